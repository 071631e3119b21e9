"""A small model cut into uneven stages, its data, and its gradients in one process."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.pipeline.types import Boundary

B, S, H, V = 2, 3, 5, 11
TOLERANCE = 1e-12
BOUNDARY = Boundary((B, S, H), torch.float64, torch.device("cpu"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up = nn.Linear(H, 7)
        self.down = nn.Linear(7, H, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return x_BSH + self.down(torch.tanh(self.up(self.norm(x_BSH))))


class Alive(torch.autograd.Function):
    """Counts the graphs that exist."""

    count = most = 0

    class Token:
        def __init__(self) -> None:
            Alive.count += 1
            Alive.most = max(Alive.most, Alive.count)

        def __del__(self) -> None:
            Alive.count -= 1

    @staticmethod
    def forward(ctx, x):
        ctx.token = Alive.Token()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Part(nn.Module):
    """A stage: maybe the embedding, some layers, maybe the head and the loss."""

    def __init__(self, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H) if first else None
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(H, V) if last else None
        self.input_wants_gradient = False
        self.outputs: list[StorageWeakRef] = []

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        self.input_wants_gradient = x_BSH is not None and x_BSH.requires_grad
        if self.embed is not None:
            x_BSH = self.embed(micro.tokens_BS)
        if torch.is_grad_enabled():
            x_BSH = Alive.apply(x_BSH)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        if self.head is None:
            if torch.is_grad_enabled():
                self.outputs.append(StorageWeakRef(x_BSH.untyped_storage()))
            return x_BSH
        logits = self.head(x_BSH).flatten(0, 1)
        return F.cross_entropy(logits, micro.labels_BS.flatten(), reduction="sum")


def make_part(stages: int, stage: int) -> Part:
    """Return one of uneven stages, with the same parameters on every rank; it may have no layer, and no parameter."""
    return copy.deepcopy(_parts(stages)[stage])


@cache
def _parts(stages: int) -> list[Part]:
    torch.manual_seed(stages)
    sizes = [(1, 2, 1, 0)[stage % 4] if stages > 2 else 1 + stage for stage in range(stages)]
    return [Part(n, first=i == 0, last=i == stages - 1).double() for i, n in enumerate(sizes)]


@cache
def micro_batches(count: int) -> list[MicroBatch]:
    """Return micro-batches with different numbers of labels, one of them with none."""
    made = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        tokens = torch.randint(V, (B, S), generator=made)
        labels = torch.randint(V, (B, S), generator=made)
        labels.view(-1)[: (index * 2) % 7] = -100
        found.append(MicroBatch(tokens, labels))
    return found


def weight(count: int) -> torch.Tensor:
    """Return what scales the gradients."""
    labels = sum(int((micro.labels_BS != -100).sum()) for micro in micro_batches(count))
    return torch.tensor(3.0 / labels, dtype=torch.float64)


@cache
def reference(stages: int, count: int) -> tuple[torch.Tensor, list[dict[str, torch.Tensor | None]]]:
    """Return the loss and each stage's gradients in one process."""
    model = [make_part(stages, stage) for stage in range(stages)]
    total = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches(count):
        x = None
        for stage in model:
            x = stage(x, micro)
        total = total + x
    (total * weight(count)).backward()
    return total.detach(), [{n: p.grad for n, p in stage.named_parameters()} for stage in model]


def close(a: torch.Tensor | None, b: torch.Tensor | None, what: str) -> None:
    assert a is not None, what
    assert b is not None, what
    error, bound = (a - b).abs().max().item(), TOLERANCE * max(1.0, b.abs().max().item())
    assert error <= bound, f"{what}: {error}"

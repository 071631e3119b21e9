"""Stages to be measured: real decoder layers, and stand-ins that send the same messages but wait instead of computing.

Four ranks on two cores would mostly measure how they share the cores. A wait occupies no core, just as work on an
accelerator occupies none, while the tensors that are sent, autograd and the executor are real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from partool.spec.model import ModelConfig
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch
from partool_runtime.model.attention import Context, Tokens
from partool_runtime.model.decoder import Block, Head
from partool_runtime.model.norm import make_norm
from partool_runtime.model.rope import tables


@dataclass(frozen=True)
class Shape:
    """A model and its micro-batches."""

    batch: int
    length: int
    hidden: int
    layers: int
    vocab: int = 1024

    def config(self) -> ModelConfig:
        """Return the decoder: heads of 32, a feed-forward network of 8/3 of the width."""
        heads = max(1, self.hidden // 32)
        return ModelConfig(
            layers=self.layers,
            hidden=self.hidden,
            ffn_hidden=8 * self.hidden // 3,
            heads=heads,
            kv_heads=heads,
            head_dim=self.hidden // heads,
            vocab=self.vocab,
        )

    def micro_batches(self, count: int) -> list[MicroBatch]:
        """Return the same ``count`` micro-batches on every rank."""
        draw = torch.Generator().manual_seed(5)
        rows = [torch.randint(self.vocab, (self.batch, self.length + 1), generator=draw) for _ in range(count)]
        return [MicroBatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]

    @property
    def boundary_bytes(self) -> int:
        """Bytes of one activation in float32."""
        return 4 * self.batch * self.length * self.hidden


@dataclass(frozen=True)
class Waits:
    """Seconds that a stage waits: forward pass, gradients of inputs, gradients of weights."""

    forward_s: float
    input_s: float
    weight_s: float


def cut(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage; the first ones get one more if they do not divide evenly."""
    each, more = divmod(layers, stages)
    ends = [each * (at + 1) + min(at + 1, more) for at in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class RealStage(nn.Module):
    """Consecutive layers of the decoder; stage 0 embeds, the last one returns the sum of token losses."""

    def __init__(self, shape: Shape, stage: int, stages: int, dtype: torch.dtype) -> None:
        super().__init__()
        config = shape.config()
        mine = cut(shape.layers, stages)[stage]
        # Weights depend on the layer only, not on the split, so gradients of different lists can be compared.
        torch.manual_seed(0)
        self.embed = nn.Embedding(config.vocab, config.hidden) if stage == 0 else None
        self.layers = nn.ModuleList(_seeded(config, layer) for layer in mine)
        torch.manual_seed(1)
        self.norm = make_norm(config) if stage == stages - 1 else None
        self.head = Head(config) if stage == stages - 1 else None
        self.to(dtype)
        self.context = Context(tables(config, shape.length, dtype, torch.device("cpu")), Tokens(shape.length))

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        if self.embed is not None:
            x_BSH = self.embed(micro.tokens_BS)
        assert x_BSH is not None
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.context)
        if self.norm is None or self.head is None:
            return x_BSH
        loss: torch.Tensor = self.head(self.norm(x_BSH), micro.labels_BS)
        return loss

    def outer(self) -> tuple[nn.Embedding, nn.Module, Head]:
        """Return embedding, final norm and head of a model of one stage."""
        if self.embed is None or self.norm is None or self.head is None:
            raise ValueError("the model is cut")
        return self.embed, self.norm, self.head


def _seeded(config: ModelConfig, layer: int) -> Block:
    torch.manual_seed(100 + layer)
    return Block(config, layer)


class TimedStage(nn.Module):
    """Stage that waits instead of computing; its tensors have the size of the real ones."""

    def __init__(self, shape: Shape, stage: int, stages: int, waits: Waits, elements: int = 1) -> None:
        super().__init__()
        self.first = _TimedFirst(shape) if stage == 0 else None
        self.layers = _TimedLayers(waits, elements)
        self.last = _TimedLast() if stage == stages - 1 else None

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        out_BSH = self.layers(x_BSH if self.first is None else self.first(micro.tokens_BS))
        return out_BSH if self.last is None else self.last(out_BSH, micro.labels_BS)


class TimedRing:
    """Timed stages for an executor that moves weights: all stages, the embedding and the head."""

    def __init__(self, shape: Shape, waits: Sequence[Waits], elements: int) -> None:
        self.first: nn.Module = _TimedFirst(shape)
        self.stages: Sequence[nn.Module] = [_TimedLayers(stage, elements) for stage in waits]
        self.last: nn.Module = _TimedLast()


class _TimedLayers(nn.Module):
    """Module that waits as long as some layers take, with weights of their size.

    The weights' gradient has its own autograd node below the one that joins them with the input, so that an executor
    that splits backward passes meets each wait in the right half.
    """

    def __init__(self, waits: Waits, elements: int) -> None:
        super().__init__()
        self.waits = waits
        self.weight = nn.Parameter(torch.ones(elements))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        time.sleep(self.waits.forward_s)
        weight = _LateWeight.apply(self.weight, self.waits.weight_s)
        return _Joined.apply(_Late.apply(x_BSH, self.waits.input_s), weight)


class _TimedFirst(nn.Module):
    """An embedding that takes no time. It is trained, so the first stage's input has a gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.size = (shape.batch, shape.length, shape.hidden)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return _Source.apply(self.weight, self.size)


class _TimedLast(nn.Module):
    """Stand-in for the head and the loss."""

    def forward(self, x_BSH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return x_BSH.sum()


class _Source(torch.autograd.Function):
    """Autograd function: a tensor of a given size that depends on a weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        return weight.new_zeros(size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_ones(1), None


class _Late(torch.autograd.Function):
    """Identity whose backward pass waits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait_s: float) -> torch.Tensor:
        ctx.wait_s = wait_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.wait_s)
        return grad, None


class _LateWeight(_Late):
    """Weight identity whose backward pass waits, deferred if the executor collects such work."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not deferral.defer(partial(time.sleep, ctx.wait_s)):
            time.sleep(ctx.wait_s)
        return grad, None


class _Joined(torch.autograd.Function):
    """Autograd function: a tensor of the input's size that depends on input and weight."""

    @staticmethod
    def forward(ctx: Any, x_BSH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.elements = weight.numel()
        return x_BSH.clone()

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_BSH.clone(), grad_BSH.new_ones(ctx.elements)


def measure(shape: Shape, repeats: int = 9) -> dict[str, Waits]:
    """Return the seconds of one layer, the embedding and the head on this core alone, medians of ``repeats``.

    I is ``autograd.grad`` with respect to the input only; W is the additional time of a whole backward pass.
    """
    torch.set_num_threads(1)
    config, (micro,) = shape.config(), shape.micro_batches(1)
    parts = RealStage(Shape(shape.batch, shape.length, shape.hidden, 1, shape.vocab), 0, 1, torch.float32)
    x_BSH = torch.randn(shape.batch, shape.length, config.hidden)
    grad_BSH = torch.randn_like(x_BSH)
    layer, (embed, norm, head) = parts.layers[0], parts.outer()
    return {
        "layer": _passes(lambda x: layer(x, parts.context), x_BSH, grad_BSH, repeats),
        "embed": _passes(lambda _: embed(micro.tokens_BS), x_BSH, grad_BSH, repeats),
        "head": _passes(lambda x: head(norm(x), micro.labels_BS), x_BSH, torch.tensor(1.0), repeats),
    }


def _passes(call: Any, x_BSH: torch.Tensor, grad: torch.Tensor, repeats: int) -> Waits:
    forward_s, input_s, whole_s = [], [], []
    for _ in range(repeats + 1):  # the first one warms up
        x = x_BSH.clone().requires_grad_()
        start = time.perf_counter()
        out = call(x)
        forward_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        torch.autograd.grad(out, x, grad, retain_graph=True, allow_unused=True)
        input_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        out.backward(grad)
        whole_s.append(time.perf_counter() - start)
    forward, inputs, whole = (sorted(times[1:])[repeats // 2] for times in (forward_s, input_s, whole_s))
    return Waits(forward, min(inputs, whole), max(whole - inputs, 0.0))


def stage_waits(parts: dict[str, Waits], layers: int, stages: int) -> list[Waits]:
    """Return the seconds of each stage; the first one includes the embedding, the last one the head."""
    found = []
    for stage, mine in enumerate(cut(layers, stages)):
        own = [parts["layer"]] * len(mine)
        own += [parts["embed"]] * (stage == 0) + [parts["head"]] * (stage == stages - 1)
        found.append(_sum(own))
    return found


def _sum(waits: Sequence[Waits]) -> Waits:
    return Waits(
        sum(part.forward_s for part in waits),
        sum(part.input_s for part in waits),
        sum(part.weight_s for part in waits),
    )

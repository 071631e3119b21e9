"""Ranks of test_pipeline_engine.py: a small model cut into stages, and the checks that need a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from partool.schedule import SCHEDULES, Schedule, check, generate
from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.pipeline.engine import Engine
from partool_runtime.parallel.pipeline.types import Boundary
from partool_runtime.parallel.pipeline.wires import Wires, open_groups

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


class Part(nn.Module):
    """A stage: maybe the embedding, some layers, maybe the head and the loss."""

    def __init__(self, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H) if first else None
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(H, V) if last else None

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        if self.embed is not None:
            x_BSH = self.embed(micro.tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        if self.head is None:
            return x_BSH
        logits = self.head(x_BSH).flatten(0, 1)
        return F.cross_entropy(logits, micro.labels_BS.flatten(), reduction="sum")


def parts(stages: int) -> list[Part]:
    """Return uneven stages with the same parameters on every rank."""
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


@cache
def reference(stages: int, count: int) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """Return the loss and each stage's gradients in one process."""
    model = parts(stages)
    total = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches(count):
        x = None
        for part in model:
            x = part(x, micro)
        total = total + x
    (total * weight(count)).backward()
    return float(total.detach()), [{n: p.grad for n, p in part.named_parameters()} for part in model]


def weight(count: int) -> torch.Tensor:
    labels = sum(int((micro.labels_BS != -100).sum()) for micro in micro_batches(count))
    return torch.tensor(3.0 / labels, dtype=torch.float64)


def close(a: torch.Tensor | None, b: torch.Tensor | None, what: str) -> None:
    assert a is not None, what
    assert b is not None, what
    error, bound = (a - b).abs().max().item(), TOLERANCE * max(1.0, b.abs().max().item())
    assert error <= bound, f"{what}: {error}"


def schedules(ranks: int) -> list[Schedule]:
    found = []
    for name, generator in SCHEDULES.items():
        for chunks in (1, 2, 4):
            for count in (ranks, 2 * ranks, 2 * ranks + 1 - ranks % 2):
                if generator.moves == "activations" and check(name, ranks, count, chunks) is None:
                    found.append(generate(name, ranks, count, chunks))
    return found


def check_schedule(schedule: Schedule, wires: Wires) -> None:
    rank = dist.get_rank()
    what = f"{schedule.name} P={schedule.ranks} M={schedule.micro_batches} chunks={schedule.chunks}"
    model = parts(schedule.stages)
    mine = {stage: model[stage] for stage in schedule.on_rank(rank)}
    engine = Engine(schedule, mine, wires)
    micro = micro_batches(schedule.micro_batches)
    total, gradients = reference(schedule.stages, len(micro))
    for _ in range(2):
        for part in model:
            part.zero_grad()
        loss = engine.step(micro, weight(len(micro)))
        assert (loss.dtype, loss.shape) == (torch.float64, ())
        if schedule.stages - 1 in mine:
            close(loss, torch.tensor(total, dtype=torch.float64), what)
        else:
            assert float(loss) == 0.0
        for stage, part in mine.items():
            for name, parameter in part.named_parameters():
                close(parameter.grad, gradients[stage][name], f"{what} stage {stage} {name}")
    seen = engine.evaluate(micro_batches(3))
    if schedule.stages - 1 in mine:
        close(seen, torch.tensor(reference(schedule.stages, 3)[0], dtype=torch.float64), what)


def parity(ranks: int) -> None:
    wires = Wires(dist.get_rank(), open_groups([range(ranks)]), BOUNDARY, timeout_s=60)
    for schedule in schedules(ranks):
        check_schedule(schedule, wires)


CASES: dict[str, Callable[..., None]] = {"parity": parity}


def main(case: str, *arguments: str) -> None:
    dist.init_process_group("gloo")
    CASES[case](dist.get_world_size(), *arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

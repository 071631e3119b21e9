"""Ranks of test_zero_controls.py: the small model of ``_zero_worker`` in other ways to gather, and one with experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import _zero_worker as zero
import torch
import torch.nn.functional as F
from _ranks import in_group
from _zero_worker import HIDDEN, LAYERS, LENGTH, SEQUENCES, VOCAB, WIDE, Case
from torch import nn

from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import StagedDecoder
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.torch_internals.fsdp import gathered_bytes

EXPERTS = 3
PERSISTENT = WIDE
"""Elements of the largest bias: norms, biases and the single row are at most as large; every matrix is larger."""
ALL = 10**9
STEPS = 4


class Experts(nn.Module):
    """Token ``t`` goes to expert ``t % 4``; of 4 there are 3. Nothing depends on an expert to whom no token goes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.scale = nn.Parameter(torch.empty(1, HIDDEN))

    def forward(self, x_BSH: torch.Tensor, tokens_BS: torch.Tensor) -> dict[str, Any]:
        out_BSH = torch.zeros_like(x_BSH)
        for number, expert in enumerate(self.experts):
            mine_BS = tokens_BS % (EXPERTS + 1) == number
            if mine_BS.any():
                out_BSH = out_BSH.index_put((mine_BS,), expert(x_BSH[mine_BS]) * self.scale)
        return {"out": out_BSH, "tokens": tokens_BS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = Experts()
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BSH: torch.Tensor, tokens_BS: torch.Tensor) -> torch.Tensor:
        y_BSH = self.norm(x_BSH)
        return x_BSH + self.down(y_BSH) + self.moe(y_BSH, tokens_BS=tokens_BS)["out"]


class ExpertModel(StagedDecoder):
    """A model whose last layers use what tokens there are."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        assert not tied
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        return enumerate(self.layers)

    def groups(self) -> list[list[nn.Module]]:
        return [[self.embed], *([layer] for layer in self.layers), [self.head]]

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, tokens_BS)
        logits = F.linear(x_BSH, self.head.weight).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels_BS.flatten(), reduction="sum")


def expert_samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a step. The last half sends tokens to no expert in even steps, to one of three in odd."""
    tokens, labels = _plain_samples(step)
    last = tokens[-SEQUENCES // 2 :]
    last[:] = last % 3 * (EXPERTS + 1) + (EXPERTS if step % 2 == 0 else step // 2 % EXPERTS)
    # Of two micro-batches of the first of two ranks, one sends nothing to experts either.
    first = tokens[: SEQUENCES // 4]
    first[:] = first % 3 * (EXPERTS + 1) + EXPERTS
    assert int(tokens.max()) < VOCAB
    assert tokens.shape == (SEQUENCES, LENGTH)
    return tokens, labels


_plain_samples = zero.samples


@contextlib.contextmanager
def with_experts() -> Any:
    """Let ``_zero_worker`` train the model with experts."""
    plain = zero.Model, zero.samples
    zero.Model, zero.samples = ExpertModel, expert_samples
    try:
        yield
    finally:
        zero.Model, zero.samples = plain


def cases(world_size: int) -> dict[str, Case]:
    leaves, sequential = ("layers.*.moe",), {"gather": "sequential"}
    if world_size == 4:  # some ranks hold nothing of most parameters
        return {
            "hybrid": Case(3, (2, 2), accumulation=3, prefetch=2, persistent=PERSISTENT, **sequential),
            "four": Case(3, (1, 4), prefetch=0, persistent=PERSISTENT, **sequential),
            "experts hybrid": Case(2, (2, 2), accumulation=3, leaves=leaves),
            "experts four": Case(3, (1, 4), leaves=leaves, prefetch=2, persistent=PERSISTENT),
        }
    ranks, twice = (1, world_size), {"accumulation": 2}
    return {
        "sequential zero-1": Case(1, ranks, **sequential, **twice),
        "sequential": Case(3, ranks, **sequential),
        "prefetch 0": Case(3, ranks, prefetch=0),
        "prefetch 3": Case(3, ranks, prefetch=3),
        "persistent": Case(3, ranks, persistent=PERSISTENT, **twice),
        "all persistent": Case(3, ranks, persistent=ALL),
        "recomputed": Case(3, ranks, recompute="full", persistent=PERSISTENT, **sequential, **twice),
        "bf16": Case(3, ranks, precision="bf16", **twice),
        "bf16 both": Case(3, ranks, precision="bf16", persistent=PERSISTENT, **sequential, **twice),
        "experts zero-0": Case(0, ranks, leaves=leaves),
        "experts zero-1": Case(1, ranks, leaves=leaves, **twice),
        "experts zero-3": Case(3, ranks, leaves=leaves),
        "experts bf16": Case(0, ranks, precision="bf16", leaves=leaves, **twice),
        "experts layer": Case(3, ranks, leaves=("layers.?",), prefetch=0, **sequential),
    }


def run(name: str, case: Case) -> dict[str, Any]:
    with with_experts() if name.startswith("experts") else contextlib.nullcontext():
        ranks = build_ranks(zero.plan_of(case), torch.device("cpu"))
        return zero.train(case, ranks) | second_step(case, ranks)


def second_step(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Return the bytes still gathered after a step, and calls and sent bytes of the next step's passes by kind."""
    model, _, stepper = zero.build(case, ranks)
    batch = zero.micro_batches(0, case, ranks)
    stepper.step(0, batch, zero.no_timer)
    kept = gathered_bytes(model)
    with CommCounter() as counter:
        stepper._passes.step(batch, torch.ones((), dtype=torch.float64), zero.no_timer)
    counted = {kind: {"calls": t.calls, "sent": t.sent_bytes} for kind, t in counter.snapshot().items()}
    return {"kept": kept, "traffic": counted}


def run_case(name: str) -> dict[str, Any]:
    """Train one case of fewer steps; ``alone``: experts that are no leaf, whose collectives do not match."""
    zero.STEPS = STEPS
    with in_group(20 if name == "alone" else 120):
        case = Case(3, (1, 2)) if name == "alone" else cases(torch.distributed.get_world_size())[name]
        return run("experts alone" if name == "alone" else name, case)

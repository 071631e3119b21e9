"""Ranks of test_sequence_dsp.py: grids of tokens over ranks against the same decoder in one process, in float64."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _expected_traffic import sent_by_stages
from _plans import small_plan
from layouts import laid
from torch.nn import functional as F

from partool.layout.grid import exchanges, turns
from partool.layout.sequence import bounds, index
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.model import ModelConfig, Weights
from partool_runtime.mesh import Ranks, open_ranks
from partool_runtime.model import AnyDecoder, Decoder
from partool_runtime.model import attention as plain
from partool_runtime.parallel.comm import CollectiveTraffic, CommCounter, sum_over
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence.apply import apply_sequence
from partool_runtime.parallel.sequence.dsp import Turner, row_positions
from partool_runtime.weights import build, build_parts, fill, materialise

SIZES: dict[str, Any] = {"hidden": 13, "ffn_hidden": 11, "vocab": 31, "heads": 6, "kv_heads": 2, "head_dim": 4}
BATCH = 2
ROW, COLUMN = "row", "column"


@dataclass(frozen=True)
class Case:
    grid: tuple[int, int]
    kinds: tuple[str, ...]
    stages: tuple[int, ...] = ()
    """Layers of each stage, where there are several; all on this rank."""
    fields: tuple[tuple[str, Any], ...] = ()
    documents: bool = False
    policy: str = "none"

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def config(self) -> ModelConfig:
        fields = {"layers": len(self.kinds), "grid": self.grid, "layer_types": self.kinds, "init_std": 0.2}
        return ModelConfig.model_validate(SIZES | fields | dict(self.fields))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(bounds(self.stages or (len(self.kinds),)))

    def plan(self, ranks: int) -> Plan:
        base = small_plan(Path("unused"), precision="fp64", training={"sequence_length": self.length})
        layout = laid(base.layout, mesh=Mesh(cp=ranks), sequence_method="dsp", sequence_order="grid", stages=self.spans,
                recompute=(self.policy,) * len(self.kinds), zero=0,)  # fmt: skip
        return base.model_copy(update={"model": self.config, "layout": layout})


LEARNED = (("position", "learned"), ("max_position", 40), ("tied_embeddings", True))
CASES = (
    Case((5, 7), (ROW, COLUMN, ROW, COLUMN)),
    Case((7, 5), (COLUMN, ROW, COLUMN, ROW), fields=LEARNED),
    Case((4, 6), (ROW, ROW, COLUMN, COLUMN, ROW), documents=True),
    Case((7, 4), (COLUMN, COLUMN)),
    Case((5, 6), (ROW, ROW), fields=(("heads", 7), ("kv_heads", 1), ("qk_norm", True))),
    Case((5, 7), (ROW, COLUMN, ROW, ROW), stages=(1, 2, 1), documents=True, fields=LEARNED),
    Case((5, 7), (ROW, COLUMN, ROW), policy="full"),
    Case((5, 7), (ROW, COLUMN, ROW), policy="selective", documents=True),
    Case((5, 7), (ROW, COLUMN, ROW), policy="attention"),
)


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, labels and documents of whole sequences; the labels of one rank's tokens are all ignored."""
    generator = torch.Generator().manual_seed(7)
    tokens, labels = (torch.randint(31, (BATCH, case.length), generator=generator) for _ in range(2))
    labels[:, :: case.grid[1]] = -100
    ends = (torch.rand((BATCH, case.length), generator=generator) < 0.2).int()
    return tokens, labels, ends.cumsum(1).int() if case.documents else None


def dense(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, layout: Any, tokens: Any, sinks_N: None = None
) -> torch.Tensor:
    """Attention through one mask of all tokens, without sinks."""
    assert sinks_N is None, "these models have no sinks"
    places = torch.arange(tokens.length)
    documents = None if tokens.documents_BL is None else (tokens.documents_BL,) * 2
    mask = plain.visible(places, places, layout, documents=documents, columns=tokens.grid[1])
    return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, attn_mask=mask, enable_gqa=True)


def made(model: AnyDecoder) -> Any:
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    return model


def reference(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model: Decoder = made(build(case.config))
    for block in model.layers:
        block.attention.core = dense
    total = model(*batch(case))
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}


def run(case: Case, ranks: Ranks) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, CollectiveTraffic]]:
    """The loss and gradients of this rank's tokens, and what it sent."""
    plan = case.plan(ranks.world_size)
    parts = build_parts(case.config, case.spans, range(len(case.spans))) if case.stages else build(case.config)
    team = apply_sequence(parts, plan, ranks)
    assert team is not None
    blocks = [block for _, block in parts.blocks()] if case.stages else list(parts.layers)
    recompute(blocks, plan.layout.recompute)
    model = made(parts)
    mine = index(plan.shares[ranks.rank])
    tokens_BL, labels_BL, documents_BL = batch(case)
    tokens_BS, labels_BS = tokens_BL[:, mine], labels_BL[:, mine]
    with CommCounter() as counter:
        if case.stages:
            x = tokens_BS
            for number, stage in model.stages.items():
                last = number == len(case.spans) - 1
                x = stage(x, labels_BS if last else None, documents_BL)
                assert last or x.shape == (BATCH, len(mine), 13)
            total = x
        else:
            total = model(tokens_BS, labels_BS, documents_BL)
        total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}, counter.snapshot()


def same(ours: torch.Tensor, theirs: torch.Tensor, what: object) -> None:
    error, limit = (ours - theirs).abs().max().item(), 1e-12 * max(1.0, theirs.abs().max().item())
    assert error <= limit, f"{what}: {error} > {limit}"


@functools.cache
def ranks_of_world() -> Ranks:
    """Return the ranks of the pool, which all cases share."""
    return open_ranks(CASES[0].plan(int(os.environ["WORLD_SIZE"])))


def check(case: Case) -> None:
    ranks = ranks_of_world()
    total, grads, traffic = run(case, ranks)
    wanted, wanted_grads = reference(case)
    same(sum_over(total, ranks.world), wanted, case)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        same(sum_over(grad, ranks.world), wanted_grads[name], (case, name))
    check_traffic(case, ranks, traffic)


def check_traffic(case: Case, ranks: Ranks, traffic: dict[str, CollectiveTraffic]) -> None:
    """Elements and messages are those of the formulas; nothing is sent twice, whatever is computed again."""
    axes = [list(case.kinds[first:stop]) for first, stop in case.spans]
    expected = sent_by_stages(case.grid, ranks.world_size, ranks.rank, axes, BATCH * 13)
    calls = 2 * sum(map(exchanges, axes))
    assert set(traffic) <= {"all_to_all"}, traffic
    seen = traffic.get("all_to_all", CollectiveTraffic())
    assert (seen.calls, seen.sent_bytes) == (calls, 8 * (expected.forward + expected.backward)), (case, seen)
    if not case.stages and set(case.kinds) == {ROW, COLUMN} and all(a != b for a, b in pairwise(case.kinds)):
        assert calls == 4 * -(-len(case.kinds) // 2), "two per pair of layers and pass"


def check_turns() -> None:
    """To rows and back to columns is where we were; a wrong order of blocks would show."""
    ranks = ranks_of_world()
    case = Case((7, 9), (ROW, COLUMN))
    plan = case.plan(ranks.world_size)
    team = apply_sequence(made(build(case.config)), plan, ranks)
    assert team is not None
    whole_BLH = torch.randn(3, 63, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turner = Turner.open(team, plan.layout)
    columns_BSH = whole_BLH[:, team.index(team.rank)].requires_grad_()
    rows_BSH = turner(columns_BSH, "row", case.grid)
    assert torch.equal(rows_BSH, whole_BLH[:, list(row_positions(team, case.grid))])
    back_BSH = turner(rows_BSH, "column", case.grid)
    assert torch.equal(back_BSH, columns_BSH)
    (grad,) = torch.autograd.grad((back_BSH * whole_BLH[:, team.index(team.rank)]).sum(), columns_BSH)
    assert torch.equal(grad, columns_BSH)
    assert [turn.before for turn in turns([ROW, COLUMN])] == [ROW, COLUMN]


def check_two_models() -> None:
    """Two models of different grids, one within the pass of the other."""
    ranks = ranks_of_world()
    one, two = Case((5, 7), (ROW, COLUMN)), Case((6, 4), (COLUMN, ROW), fields=LEARNED)
    totals = {}
    for case in (one, two):
        model = build(case.config)
        apply_sequence(model, case.plan(ranks.world_size), ranks)
        totals[case] = made(model), index(case.plan(ranks.world_size).shares[ranks.rank])
    losses = []
    for case, (model, mine) in totals.items():
        tokens_BL, labels_BL, _ = batch(case)
        losses.append(model(tokens_BL[:, mine], labels_BL[:, mine]))
    sum(losses).backward()
    for case, (model, _) in totals.items():
        wanted = reference(case)[1]
        for name, parameter in model.named_parameters():
            same(sum_over(parameter.grad, ranks.world), wanted[name], (case, name))

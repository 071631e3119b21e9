"""Ranks of test_sequence_startrail.py: attention in teams and rings against that of one process."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from _ranks import group_of
from torch.nn import functional as F

from partool.cost.sequence.startrail import sent
from partool.cost.sequence.types import AttentionSizes
from partool.layout.sequence import Order, shares
from partool.layout.startrail import Trails
from partool.spec.parallel import Inside
from partool_runtime.model.attention import AttentionLayout, Tokens, visible
from partool_runtime.parallel.comm import CollectiveTraffic, CommCounter
from partool_runtime.parallel.sequence.startrail import attend_in
from partool_runtime.parallel.sequence.types import SequenceTeam

WIDTH = 4


class Case(NamedTuple):
    ranks: int
    members: int
    length: int
    heads: tuple[int, int] = (3, 3)
    inside: Inside = "teams"
    order: Order = "zigzag"
    batch: int = 2
    window: int | None = None
    documents: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def trails(self) -> Trails:
        return Trails(self.ranks, self.members, self.inside)


CASES = (
    Case(3, 1, 17),
    Case(4, 2, 17, (7, 7)),
    Case(4, 2, 3, (2, 1)),
    Case(4, 2, 1, (2, 1)),
    Case(8, 2, 16, (6, 2), batch=3),
    Case(8, 2, 35, (4, 1), inside="rings"),
    Case(8, 2, 37, (3, 3), order="contiguous", window=3),
    Case(8, 2, 37, (3, 1), order="contiguous", window=11, documents=True),
    Case(8, 2, 35, (2, 1), inside="rings", window=5, documents=True),
    Case(8, 2, 35, window=35),
    Case(9, 3, 41, (5, 5), inside="rings", documents=True),
    Case(12, 2, 53, (6, 3), order="contiguous"),
    Case(12, 2, 53, (2, 2), inside="rings", batch=1),
    Case(16, 2, 67, (2, 1), documents=True),
    Case(16, 4, 67, (3, 3), inside="rings"),
    Case(16, 4, 13, (1, 1)),
    Case(12, 2, 53, (6, 3), dtype=torch.bfloat16),
)


def check_case(case: Case, number: int) -> None:
    """Compare one layer with one process, on the ranks of the case."""
    group = group_of(case.ranks)
    if dist.get_rank() < case.ranks:
        dealt = case.trails.by_rank(shares(case.length, case.ranks, case.order))
        check(case, SequenceTeam(group, dist.get_rank(), dealt, (tuple(range(case.ranks)),)), number)


def check(case: Case, team: SequenceTeam, seed: int) -> None:
    """Compare results and gradients with those of one process, and what is sent with the formula."""
    layout, whole, documents_BL = AttentionLayout(case.window), inputs(case, seed), documents(case, seed)
    expected = reference(case, whole, documents_BL)
    mine = torch.tensor(team.index(team.rank), dtype=torch.int64)
    q, k, v, grad = (x[:, :, mine].to(case.dtype) for x in whole)
    heads = [x.requires_grad_() for x in (q, k, v)]
    core = attend_in(team, case.trails)
    with CommCounter() as forward:
        out = core(*heads, layout, Tokens(case.length, mine, documents_BL))
    with CommCounter() as backward:
        out.backward(grad)
    for name, a, b in zip(("out", "dq", "dk", "dv"), [out, *(x.grad for x in heads)], expected, strict=True):
        assert a is not None
        same(f"{case} {name}", a.detach(), b[:, :, mine])
    formula = sent(
        team.shares, AttentionSizes(case.batch, *case.heads, WIDTH, WIDTH, case.window), team.rank, case.trails
    )
    counted = tuple(sum_sent(counter.snapshot()) for counter in (forward, backward))
    assert counted == formula.bytes(q.itemsize), (case, team.rank, counted, formula)


def reference(case: Case, whole: list[torch.Tensor], documents_BL: torch.Tensor | None = None) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    places = torch.arange(case.length)
    both = None if documents_BL is None else (documents_BL, documents_BL)
    mask = visible(places, places, AttentionLayout(case.window), documents=both)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out.backward(whole[3])
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def two_at_once() -> None:
    """Two models whose backward passes come in the order of their forward passes, not in the opposite one."""
    cases = (Case(4, 2, 17, (7, 7)), Case(4, 2, 11, (2, 1), order="contiguous"))
    group = group_of(4)
    if dist.get_rank() >= 4:
        return
    found = []
    for case in cases:
        dealt = case.trails.by_rank(shares(case.length, case.ranks, case.order))
        team = SequenceTeam(group, dist.get_rank(), dealt, (tuple(range(4)),))
        mine = torch.tensor(team.index(team.rank), dtype=torch.int64)
        whole = inputs(case, 0)
        q, k, v = (x[:, :, mine].requires_grad_() for x in whole[:3])
        core = attend_in(team, case.trails)
        out = core(q, k, v, AttentionLayout(None), Tokens(case.length, mine))
        found.append((case, whole, mine, (q, k, v), out, core))
    for case, whole, mine, heads, out, _ in found:
        out.backward(whole[3][:, :, mine])
        for x, b in zip(heads, reference(case, whole)[1:], strict=True):
            assert x.grad is not None
            same(f"two at once {case}", x.grad, b[:, :, mine])


def inputs(case: Case, seed: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result, of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = case.heads
    return [
        torch.randn(case.batch, heads, case.length, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (queries, keys, keys, queries)
    ]


def documents(case: Case, seed: int) -> torch.Tensor | None:
    if not case.documents:
        return None
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(case.batch, case.length, generator=generator) < 0.15).int().cumsum(1).int()


def sum_sent(traffic: dict[str, CollectiveTraffic]) -> int:
    assert set(traffic) <= {"send"}, traffic
    return sum(one.sent_bytes for one in traffic.values())


def same(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    bound = 1e-12 if ours.dtype == torch.float64 else 0.03
    error = (ours - theirs).abs().max().item() if ours.numel() else 0.0
    assert error <= bound * max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0), (what, error)

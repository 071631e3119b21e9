"""Ulysses, alone and inside of a ring (USP), against attention in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks

from partool.layout.sequence import even, index, joined, shares, tokens

WORKER = Path(__file__).parent / "_sequence_ulysses_worker.py"


@pytest.mark.timeout(180)
def test_attention_on_shares_equals_one_process() -> None:
    run_ranks(WORKER, 1)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("length", "ranks", "inner"), [(17, 6, 3), (17, 6, 2), (16, 8, 4), (5, 6, 2), (3, 8, 2)])
def test_groups_hold_together_what_a_rank_of_the_ring_would(length: int, ranks: int, inner: int, order: str) -> None:
    dealt = shares(length, ranks, order, inner=inner)
    assert sorted(place for spans in dealt for place in index(spans)) == list(range(length))
    assert joined(dealt, inner) == shares(length, ranks // inner, order)
    for group, spans in enumerate(joined(dealt, inner)):
        mine = dealt[group * inner : (group + 1) * inner]
        assert [tokens(share) for share in mine] == even(tokens(spans), inner)

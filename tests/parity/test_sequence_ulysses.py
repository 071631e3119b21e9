"""Ulysses, alone and inside of a ring (USP), against attention in one process."""

from __future__ import annotations

import _sequence_ulysses_worker as worker
import pytest
from _ranks import Pools, named

from partool.layout.sequence import even, index, joined, shares, tokens

ULYSSES, USP = named(worker.ULYSSES), named(worker.USP)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(ULYSSES))
def test_attention_on_shares_equals_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.WORLD, worker.check_ulysses, ULYSSES[name], list(ULYSSES).index(name))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(USP))
def test_rings_of_groups_equal_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.WORLD, worker.usp_of_all_teams, USP[name], list(USP).index(name))


@pytest.mark.timeout(150)
def test_layers_of_two_models_keep_apart(pools: Pools) -> None:
    pools.run(worker.WORLD, worker.layers_of_two_models)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("length", "ranks", "inner"), [(17, 6, 3), (17, 6, 2), (16, 8, 4), (5, 6, 2), (3, 8, 2)])
def test_groups_hold_together_what_a_rank_of_the_ring_would(length: int, ranks: int, inner: int, order: str) -> None:
    dealt = shares(length, ranks, order, inner=inner)
    assert sorted(place for spans in dealt for place in index(spans)) == list(range(length))
    assert joined(dealt, inner) == shares(length, ranks // inner, order)
    for group, spans in enumerate(joined(dealt, inner)):
        mine = dealt[group * inner : (group + 1) * inner]
        assert [tokens(share) for share in mine] == even(tokens(spans), inner)

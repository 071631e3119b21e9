"""Placement of StarTrail's ranks, and the closed form of their traffic."""

from __future__ import annotations

from itertools import pairwise

import pytest

from partool.cost.sequence.startrail import sent
from partool.cost.sequence.types import AttentionSizes
from partool.layout.sequence import index, shares
from partool.layout.startrail import Trails, fits
from partool.spec.parallel import Inside

SIZES = ((3, 1), (4, 2), (8, 2), (12, 2), (16, 2), (16, 4), (9, 3), (36, 3))
INSIDE: tuple[Inside, ...] = ("teams", "rings")


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(("ranks", "members"), SIZES)
def test_each_team_meets_all_keys_once(ranks: int, members: int, inside: Inside) -> None:
    trails = Trails(ranks, members, inside)
    assert sorted(rank for team in range(trails.teams) for rank in trails.team(team)) == list(range(ranks))
    for team in range(trails.teams):
        met = [trails.block(rank, step) for rank in trails.team(team) for step in range(trails.length)]
        assert sorted(met) == list(range(trails.teams))
    for rank in range(ranks):
        ring = trails.ring(rank)
        following = ring[(ring.index(rank) + 1) % len(ring)]
        for step in range(trails.length):
            assert trails.rank(*trails.place(rank)) == rank
            assert trails.block(following, step + 1) == trails.block(rank, step)
            readers = trails.readers(rank, step)
            assert sorted(readers) == [r for r in range(ranks) if trails.block(r, step) == trails.place(rank)[0]]


@pytest.mark.parametrize("inside", INSIDE)
def test_rings_and_teams_stay_within_their_group_of_neighbours(inside: Inside) -> None:
    trails = Trails(16, 2, inside)
    assert all(len({rank // 8 for rank in trails.ring(rank)}) == 1 for rank in range(16))
    assert all(len({rank // 8 for rank in trails.team(team)}) == 1 for team in range(8))
    neighbours = trails.team(1) if inside == "teams" else trails.ring(0)
    assert [b - a for a, b in pairwise(neighbours)] == [1] * (len(neighbours) - 1)


def test_sixteen_ranks_in_teams_of_two_meet_what_the_paper_draws() -> None:
    trails = Trails(16, 2)
    assert sorted(trails.block(0, step) for step in range(4)) == [0, 2, 4, 6]
    assert sorted(trails.block(1, step) for step in range(4)) == [1, 3, 5, 7]


@pytest.mark.parametrize("inside", INSIDE)
def test_the_tokens_of_a_team_lie_together(inside: Inside) -> None:
    trails = Trails(8, 2, inside)
    dealt = trails.by_rank(shares(24, 8))
    for team in range(4):
        held = [place for rank in trails.team(team) for place in index(dealt[rank])]
        assert held == list(range(6 * team, 6 * team + 6))


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(("ranks", "members"), SIZES)
def test_where_sizes_divide_the_closed_form_holds(ranks: int, members: int, inside: Inside) -> None:
    trails, each = Trails(ranks, members, inside), 6
    dealt = trails.by_rank(shares(each * ranks, ranks, "zigzag"))
    heads = AttentionSizes(batch=2, queries=8, keys=2, key_dim=5, value_dim=5)
    unit, share = 2 * each * 8 * 5, 2 / 8
    for rank in range(ranks):
        own = rank in trails.readers(rank)
        pairs = 2 * share * (ranks / members - own)
        found = sent(dealt, heads, rank, trails)
        assert found.forward == unit * (pairs + 2 * (members - 1))
        assert found.forward_wide == unit / 5 * (members - 1)
        assert found.backward == unit * (pairs + 4 * (members - 1))
        home = trails.block(rank, trails.length - 1) == trails.place(rank)[0]
        passed = trails.length - 1 + 1  # steps around the ring, and the transfer home
        wide = 2 * share * (members * passed - home)
        assert found.backward_wide == unit * (wide + (members - 1) / 5)


def test_teams_whose_square_does_not_divide_do_not_fit() -> None:
    assert [members for members in range(1, 13) if fits(12, members)] == [1, 2]
    assert [members for members in range(1, 17) if fits(16, members)] == [1, 2, 4]

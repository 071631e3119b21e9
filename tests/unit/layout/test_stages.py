"""Splits of layers over stages, compared with an enumeration of all splits."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.layout.stages import balance

costs = st.lists(st.integers(1, 5).map(float), min_size=1, max_size=9)


def largest(bounds: tuple[tuple[int, int], ...], costs: list[float], first: float, last: float) -> float:
    sums = [sum(costs[start:stop]) for start, stop in bounds]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(costs, st.integers(1, 9), st.floats(0, 8), st.floats(0, 8))
def test_no_split_is_better(costs: list[float], stages: int, first: float, last: float) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match="cannot fill"):
            balance(costs, stages)
        return
    found = balance(costs, stages, first, last)
    assert found[0][0] == 0
    assert found[-1][1] == len(costs)
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(stop > start for start, stop in found)
    cuts = combinations(range(1, len(costs)), stages - 1)
    best = min(largest(tuple(zip((0, *cut), (*cut, len(costs)), strict=True)), costs, first, last) for cut in cuts)
    assert largest(found, costs, first, last) == pytest.approx(best)
    assert balance(costs, stages, first, last) == found


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 40), st.integers(0, 60), st.integers(0, 60)
)
def test_a_grain_of_all_costs_does_not_change_the_split(grains: list[int], stages: int, first: int, last: int) -> None:
    costs, stages = [count / 20 for count in grains], min(stages, len(grains))
    known = balance(costs, stages, first / 20, last / 20, grain=0.05)
    assert known == balance(costs, stages, first / 20, last / 20)


def test_equal_layers_are_split_evenly() -> None:
    assert balance([1.0] * 32, 4) == ((0, 8), (8, 16), (16, 24), (24, 32))
    assert [stop - start for start, stop in balance([1.0] * 10, 4)] == [3, 3, 2, 2]


def test_the_head_takes_the_place_of_layers() -> None:
    assert [stop - start for start, stop in balance([1.0] * 80, 8, 0.0, 3.0)] == [10, 10, 10, 10, 10, 11, 11, 8]

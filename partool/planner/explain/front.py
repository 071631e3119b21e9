"""Layouts that tables need besides those of the search: the Pareto front, and the layout with the least bound.

Groups that cannot hold such a layout, by their least time and their least memory, are not priced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from partool.cost.case import SCHEDULES
from partool.cost.memory.fit import GREEN
from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import SLACK, Priced, room
from partool.planner.search.prices import Prices
from partool.planner.search.score import ScoreWeights
from partool.planner.search.solve import Solution

_FRONT = 6
_MARGIN = 0.99
"""Factor on the least time and the least memory of groups, which are not proven in every detail."""
_SMALLEST = 48
"""Number of groups that are priced for the front, of groups that are about as fast as each other."""
_AT_FIRST, _AT_ONCE = 256, 4096
"""Numbers of groups whose memory is priced before the next groups are known to be slower, at first and at most."""


def front(solution: Solution) -> list[Priced]:
    """Return exactly priced layouts from the Pareto front of time and memory, from the fastest layout to the smallest.

    The front is taken over the layouts of the search, and over layouts with 1F1B that save most memory.
    """
    search, space = solution.search, solution.space
    leaves, smallest = solution.overall.leaves, _SmallestLayouts(solution)
    plain = np.flatnonzero(np.broadcast_to(space.groups.schedule == SCHEDULES.index("1f1b"), space.size))
    plain = plain[np.argsort(search.bound_s[plain], kind="stable")]
    parts = [(leaves.group, leaves.policy, leaves.bound_s, leaves.memory_bytes)]
    start, count = 0, _AT_FIRST
    while start < len(plain):
        near = plain[start : start + count]
        start, count = start + count, 2 * count
        if len(near := _small_groups(search, near, smallest)):
            parts.append(_small_layouts(search, near, smallest))
            smallest.add(*parts[-1][2:])
    groups, policies, times, sizes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    fits = np.flatnonzero(sizes <= solution.problem.capacity_bytes)
    order = fits[np.lexsort((sizes[fits], times[fits]))]
    if not len(order):
        return []
    least = np.minimum.accumulate(sizes[order])
    ends = order[np.concatenate([[True], least[1:] < least[:-1]])]
    steps = dict.fromkeys(np.linspace(0, len(ends) - 1, _FRONT).round().astype(int).tolist())
    return [search.price(groups[index], policies[index]) for index in ends[list(steps)]]


class _SmallestLayouts:
    """The least memory of layouts that fit, by their time; at first of the leaves of a search."""

    def __init__(self, solution: Solution) -> None:
        leaves = solution.overall.leaves
        self._capacity_bytes = solution.problem.capacity_bytes
        self._bound_s, self._bytes = np.zeros(0), np.zeros(0)
        self.add(leaves.bound_s, leaves.memory_bytes)

    def add(self, bound_s: Any, layout_bytes: Any) -> None:
        """Take further layouts, those that fit."""
        fits = layout_bytes <= self._capacity_bytes
        times, sizes = np.concatenate([self._bound_s, bound_s[fits]]), np.concatenate([self._bytes, layout_bytes[fits]])
        order = np.argsort(times, kind="stable")
        self._bound_s, self._bytes = times[order], np.minimum.accumulate(sizes[order])

    def bytes_within(self, times_s: Any) -> Any:
        """Return the least memory of the layouts that take at most ``times_s``; layouts with more are not on the front.

        Where no layout is as fast, it is what one may need at most.
        """
        least = np.concatenate([[self._capacity_bytes * (1.0 + SLACK)], self._bytes])
        return least[np.searchsorted(self._bound_s, times_s, side="right")]


def _small_groups(search: Search, groups: Any, smallest: _SmallestLayouts) -> Any:
    """Return the few of some groups that need least memory, if they need less than any layout as fast as their bounds.

    Memory is that of the training state; the groups are about as fast as each other.
    """
    most = smallest.bytes_within(_MARGIN * search.bound_s[groups])
    groups = groups[_MARGIN * search.least_bytes[groups] < most]
    return np.sort(groups[np.argsort(search.least_bytes[groups], kind="stable")[:_SMALLEST]])


def _small_layouts(search: Search, groups: Any, smallest: _SmallestLayouts) -> tuple[Any, Any, Any, Any]:
    """Return group, policy, bounds of time and of memory of those layouts of some groups that may be on the front.

    Only policies that save most memory are looked at.
    """
    extremes = search.extremes()
    group, policy = np.tile(groups, len(extremes)), np.repeat(np.array(extremes), len(groups))
    allowed = search.space.allowed(group, policy)
    group, policy = group[allowed], policy[allowed]
    total = search.fitting_bytes(group, policy, smallest.bytes_within(_MARGIN * search.bound_s[group]))
    small = np.isfinite(total)
    group, policy = group[small], policy[small]
    return group, policy, search.bounds(group, policy), total[small]


def least_bound(
    problem: Problem,
    bounded: Search | None = None,
    *,
    longest_s: float = float("inf"),
    takes: Callable[[int], bool] = lambda _: True,
) -> Priced | None:
    """Return the layout with the least bound of the score among those that surely fit with one policy on all layers.

    Groups are tried in the order of their bound under the policy that recomputes least. ``bounded`` is a search of the
    same problem whose groups are bounded. If a step of that layout takes longer than ``longest_s``, the result is None
    or a layout whose step takes longer, too. ``takes`` says which numbers of data-parallel ranks are looked at.
    """
    problem.budget.subject = f"layouts on only {problem.world_size:,} devices"
    space = build(problem, takes) if bounded is None else bounded.space
    if not space.size:
        return None
    table = space.policies
    alike = (table.share == 1.0) & ((table.recompute != 1) | (table.recompute == table.recompute.min()))
    prices, weights = Prices(problem, space, None, alike), ScoreWeights.of(problem, space.groups, space.size, table)
    times_s = prices.least_times() if bounded is None else bounded.bound_s
    base = times_s * (1.0 + weights.group + weights.policy[alike].min())
    limit_s = float("inf")
    if longest_s < limit_s:
        # Bounds of the score leave out filled memory. A layout with a higher one takes longer.
        most = weights.group[_MARGIN * times_s <= longest_s].max(initial=0.0) + weights.policy[alike].max()
        limit_s = longest_s * (1.0 + most)
    order = np.argsort(base, kind="stable")
    order = order[_MARGIN * base[order] <= min(limit_s, sys.float_info.max)]
    least: tuple[float, int, int] | None = None
    start, count = 0, _AT_FIRST
    while start < len(order):
        near = order[start : start + count]
        start, count = start + count, min(4 * count, _AT_ONCE)
        most_s = limit_s if least is None else min(limit_s, least[0])
        if _MARGIN * base[near[0]] > most_s:
            break
        candidate = _least_of(prices, weights, np.sort(near), most_s)
        least = min((one for one in (least, candidate) if one is not None), default=None)
    return None if least is None else Priced(problem, layout_of(problem, space.rows(*least[1:])))


def _least_of(prices: Prices, weights: ScoreWeights, groups: Any, most_s: float) -> tuple[float, int, int] | None:
    """Return bound, group and policy of the layout with the least bound that fits, among groups in ascending order.

    Layouts whose bound is above ``most_s`` whatever they offload are left out. Of layouts with equal bounds it is the
    one of the first group, under its first policy.
    """
    problem, space, policies = prices.problem, prices.space, prices.policies
    table, capacity = space.policies, problem.capacity_bytes
    if len(policies) > 1 and not table.activations[policies].any():
        # The last policy recomputes most, so where it does not fit, no other does.
        smallest = room(problem, space.rows(groups, np.full(len(groups), policies[-1]))).total_bytes
        groups = groups[smallest <= capacity * (1.0 + SLACK)]
    group, policy = np.repeat(groups, len(policies)), np.tile(policies, len(groups))
    allowed = space.allowed(group, policy)
    factor = 1.0 + weights.group[group] + weights.policy[policy]
    if most_s < float("inf"):
        allowed &= _MARGIN * prices.policy_bounds(groups).ravel() * factor <= most_s
    group, policy = group[allowed], policy[allowed]
    bound, total = prices.columns(group, policy, GREEN)
    bound = bound * factor[allowed]
    fits = np.flatnonzero(total <= capacity)
    if not len(fits):
        return None
    index = fits[np.argmin(bound[fits])]
    return float(bound[index]), int(group[index]), int(policy[index])

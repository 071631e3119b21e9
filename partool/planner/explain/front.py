"""Layouts that tables need besides those of the search: the Pareto front, and the layout with the least bound.

Groups that cannot hold such a layout, by their least time and their least memory, are not priced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from partool.cost.case import SCHEDULES
from partool.cost.memory.fit import GREEN
from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.price import SLACK, Priced, room
from partool.planner.search.solve import Solution

_FRONT = 6
_MARGIN = 0.99
"""Factor on the least time and the least memory of groups, which are not proven in every detail."""
_AT_FIRST, _AT_ONCE = 256, 4096
"""Numbers of groups whose memory is priced before the next groups are known to be slower, at first and at most."""


def front(solution: Solution) -> list[Priced]:
    """Return exactly priced layouts from the Pareto front of time and memory, from the fastest layout to the smallest.

    The front is taken over the layouts of the search, and over layouts with 1F1B that save most memory.
    """
    search, space = solution.search, solution.space
    leaves = solution.overall.leaves
    plain = np.flatnonzero(np.broadcast_to(space.groups.schedule == SCHEDULES.index("1f1b"), space.size))
    plain = plain[_may_be_on_front(solution, plain, search.least_bytes[plain])]
    plain = plain[_may_be_on_front(solution, plain, search.least_memory(plain)[0])]
    extremes = search.extremes()
    group, policy = np.tile(plain, len(extremes)), np.repeat(np.array(extremes), len(plain))
    allowed = space.allowed(group, policy)
    group, policy = group[allowed], policy[allowed]
    bound, total = search.columns(group, policy)
    groups, policies = np.concatenate([leaves.group, group]), np.concatenate([leaves.policy, policy])
    times, sizes = np.concatenate([leaves.bound_s, bound]), np.concatenate([leaves.memory_bytes, total])
    fits = np.flatnonzero(sizes <= solution.problem.capacity_bytes)
    order = fits[np.lexsort((sizes[fits], times[fits]))]
    if not len(order):
        return []
    least = np.minimum.accumulate(sizes[order])
    ends = order[np.concatenate([[True], least[1:] < least[:-1]])]
    steps = dict.fromkeys(np.linspace(0, len(ends) - 1, _FRONT).round().astype(int).tolist())
    return [search.price(groups[index], policies[index]) for index in ends[list(steps)]]


def _may_be_on_front(solution: Solution, groups: Any, least_bytes: Any) -> Any:
    """Return a mask of groups; False if all layouts of a group are too large, or no better than one of the search.

    Each group needs ``least_bytes`` at least.
    """
    search, leaves, capacity = solution.search, solution.overall.leaves, solution.problem.capacity_bytes
    may_fit = least_bytes <= capacity * (1.0 + SLACK)
    fits = np.flatnonzero(leaves.memory_bytes <= capacity)
    if not len(fits):
        return may_fit
    order = fits[np.argsort(leaves.bound_s[fits], kind="stable")]
    least = np.concatenate([[np.inf], np.minimum.accumulate(leaves.memory_bytes[order])])
    before = np.searchsorted(leaves.bound_s[order], _MARGIN * search.bound_s[groups], side="right")
    return may_fit & (least[before] > _MARGIN * least_bytes)


def least_bound(problem: Problem) -> Priced | None:
    """Return the layout with the least bound of the score among those that surely fit with one policy on all layers.

    Groups are tried in the order of their bound under the policy that recomputes least.
    """
    problem.budget.subject = f"layouts on only {problem.world_size:,} devices"
    space = build(problem)
    table, search = space.policies, Search(problem, space)
    if not space.size:
        return None
    alike = (table.share == 1.0) & ((table.recompute != 1) | (table.recompute == table.recompute.min()))
    policies = np.flatnonzero(alike)
    base = search.least_times() * (1.0 + search.weights.group + search.weights.policy[policies].min())
    order = np.argsort(base, kind="stable")
    least: tuple[float, int, int] | None = None
    start, count = 0, _AT_FIRST
    while start < space.size:
        near = order[start : start + count]
        start, count = start + count, min(4 * count, _AT_ONCE)
        if least is not None and _MARGIN * base[near[0]] > least[0]:
            break
        candidate = _least_of(search, np.sort(near), policies)
        least = min((one for one in (least, candidate) if one is not None), default=None)
    return None if least is None else search.price(*least[1:])


def _least_of(search: Search, groups: Any, policies: Any) -> tuple[float, int, int] | None:
    """Return bound, group and policy of the layout with the least bound that fits, among groups in ascending order.

    Of layouts with equal bounds it is the one of the first group, under its first policy.
    """
    table, capacity, space = search.space.policies, search.problem.capacity_bytes, search.space
    if len(policies) > 1 and not table.activations[policies].any():
        # The last policy recomputes most, so where it does not fit, no other does.
        smallest = room(search.problem, space.rows(groups, np.full(len(groups), policies[-1]))).total_bytes
        groups = groups[smallest <= capacity * (1.0 + SLACK)]
    group, policy = np.repeat(groups, len(policies)), np.tile(policies, len(groups))
    allowed = space.allowed(group, policy)
    group, policy = group[allowed], policy[allowed]
    bound, total = search.columns(group, policy, GREEN)
    bound = bound * (1.0 + search.weights.group[group] + search.weights.policy[policy])
    fits = np.flatnonzero(total <= capacity)
    if not len(fits):
        return None
    index = fits[np.argmin(bound[fits])]
    return float(bound[index]), int(group[index]), int(policy[index])

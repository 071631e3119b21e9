"""Bounds of a search beside the exact times of the layouts that they bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced
from partool.planner.search.refine import refined
from partool.planner.search.space import Space

CLOSE = 1.0 + 1e-9
LAYOUTS = 8
"""Number of random layouts of each problem."""


def bounds(problem: Problem, space: Space, group: Any, policy: Any) -> dict[str, Any]:
    """Return every bound that a search has of layouts, by name."""
    search = Search(problem, space)
    first = search.bounds(group, policy)
    second = first.copy()
    for at in np.flatnonzero(np.broadcast_to(space.groups.pp, space.size)[group] > 1):
        second[at] = refined(problem, space.rows(group[at : at + 1], policy[at : at + 1])).bound_s[0]
    return {
        "first": first,
        "second": second,
        "of the group": search.group_bounds(group),
        "of the group and what it recomputes": search.policy_bounds(group)[np.arange(len(group)), policy],
    }


def above(problem: Problem, seed: int, count: int) -> list[str]:
    """Return a line for each bound of ``count`` random layouts that is above the layout's exact time."""
    space = build(problem)
    if not space.size:
        return []
    random = np.random.default_rng(seed)
    group, policy = random.integers(0, space.size, count), random.integers(0, len(space.policies), count)
    kept = space.allowed(group, policy)
    group, policy = group[kept], policy[kept]
    found = bounds(problem, space, group, policy) if len(group) else {}
    exact = [
        Priced(problem, layout_of(problem, space.rows(*pair))).time.step_time_s
        for pair in zip(group, policy, strict=True)
    ]
    return [
        f"{name}: {bound / time_s:.6f} of the exact time, group {group[at]}, policy {policy[at]}"
        for name, column in found.items()
        for at, (bound, time_s) in enumerate(zip(column, exact, strict=True))
        if bound > time_s * CLOSE
    ]

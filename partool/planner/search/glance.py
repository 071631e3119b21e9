"""A good layout at a small price: the best of a few, where a whole search would find no winner."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partool.cost.memory.fit import GREEN
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.price import Priced

_GROUPS = 64
"""Number of groups that may fit, whose layouts are bounded."""
_TOGETHER, _MOST = 1024, 8192
"""Numbers of groups whose least memory is priced at once, and at most, to find those that may fit."""
_EXACT = 8
"""Number of layouts that are priced exactly."""


def glance(search: Search, shared: Search, wanted: NDArray[np.bool_], few: NDArray[np.bool_]) -> Priced | None:
    """Return the best of a few layouts of ``search`` that are sure to fit; None if none of them is.

    Layouts of the groups ``wanted`` under any policy, or of any group under the policies ``few``, count. Groups come
    in the order of their bounds in ``shared``. The result is a good layout, and not always the best.
    """
    first, policies = _first(search, shared), search.policies
    group, policy = np.repeat(first, len(policies)), np.tile(policies, len(first))
    allowed = search.space.allowed(group, policy) & (wanted[group] | few[policy]) if len(group) else np.zeros(0, bool)
    group, policy = group[allowed], policy[allowed]
    bound, _ = search.columns(group, policy, GREEN)
    best: Priced | None = None
    for index in np.argsort(bound, kind="stable")[:_EXACT]:
        if not np.isfinite(bound[index]) or (best is not None and bound[index] >= best.step_time_s):
            break
        one = search.price(group[index], policy[index])
        if (best is None or one.step_time_s < best.step_time_s) and one.safe:
            best = one
    return best


def _first(search: Search, shared: Search) -> NDArray[np.int64]:
    """Return the first groups that may fit, by their bounds in ``shared``."""
    order = search.groups[np.argsort(shared.bounds_of(search.groups), kind="stable")][:_MOST]
    groups = order[:0]
    for start in range(0, len(order), _TOGETHER):
        near = order[start : start + _TOGETHER]
        groups = np.concatenate([groups, near[search.least_memory(near)[0] <= search.problem.capacity_bytes]])
        if len(groups) >= _GROUPS:
            break
    return groups[:_GROUPS]

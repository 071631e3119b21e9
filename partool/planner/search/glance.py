"""A good layout at a small price: the best of a few, where a whole search would take long."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partool.planner.search.branch_and_bound import Search
from partool.planner.search.price import Priced

_GROUPS = 64
"""Number of groups that may fit, whose layouts are bounded."""
_TOGETHER, _MOST = 1024, 8192
"""Numbers of groups whose least memory is priced at once, and at most, to find those that may fit."""
_EXACT = 8
"""Number of layouts that are priced exactly."""


def glance(search: Search, shared: Search, limit_s: float) -> Priced | None:
    """Return the best of a few layouts of ``search`` with a score below ``limit_s``; None if none of them has.

    Groups come in the order of their bounds in ``shared``. The result is a good layout, and not always the best.
    """
    first, policies = _first(search, shared), search.policies
    group, policy = np.repeat(first, len(policies)), np.tile(policies, len(first))
    allowed = search.space.allowed(group, policy) if len(group) else np.zeros(0, bool)
    group, policy = group[allowed], policy[allowed]
    bound_s, _ = search.columns(group, policy)
    bound_s = bound_s * (1.0 + search.weights.group[group] + search.weights.policy[policy])
    best: Priced | None = None
    for index in np.argsort(bound_s, kind="stable")[:_EXACT]:
        if not bound_s[index] < limit_s:
            break
        one = search.price(group[index], policy[index])
        if one.fits and search.score_s(one) < limit_s:
            best, limit_s = one, search.score_s(one)
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

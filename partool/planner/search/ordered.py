"""Order of exactly priced layouts by score, in which only layouts that may come next are simulated."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from partool.planner.search.branch_and_bound import Search
from partool.planner.search.price import Priced, bounds_s


def best_of_kinds(
    search: Search, kind: Callable[[Priced], Hashable], wanted: Callable[[Priced], bool] = lambda _: True
) -> Iterator[Priced]:
    """Yield the best wanted layout of each kind, in the order of scores, among the layouts that a search has priced.

    Layouts with equal scores come in the order in which they were priced. Layouts whose bound is above the score of a
    layout of their kind are not simulated.
    """
    every = list(search.exact.values())
    yielded_kinds: set[Hashable] = set()
    heap = [(bound, index, False) for index, bound in enumerate(_bounds(search))]
    heapq.heapify(heap)
    while heap:
        _, index, exact = heapq.heappop(heap)
        one = every[index]
        of_kind = kind(one)
        if of_kind in yielded_kinds or not wanted(one):
            continue
        if exact:
            yielded_kinds.add(of_kind)
            yield one
        else:
            heapq.heappush(heap, (one.score_s, index, True))


def _bounds(search: Search) -> list[float]:
    """Return figures that are at most the scores, for each layout that a search has priced."""
    if not search.exact:
        return []
    group, policy = (np.array(part) for part in zip(*search.exact, strict=True))
    first = bounds_s(search.problem, search.space.rows(group, policy)).tolist()
    weights = (1.0 + search.weights.group[group] + search.weights.policy[policy]).tolist()
    times_s = [max(bound, search.second_s(key)) for bound, key in zip(first, search.exact, strict=True)]
    return [weight * time_s for weight, time_s in zip(weights, times_s, strict=True)]

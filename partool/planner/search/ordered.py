"""Order of exactly priced layouts by time, in which only layouts that may come next are simulated."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator

import numpy as np

from partool.planner.search.branch_and_bound import Search
from partool.planner.search.price import Priced, bounds_s


def fastest_of_kinds(
    search: Search, kind: Callable[[Priced], Hashable], wanted: Callable[[Priced], bool] = lambda _: True
) -> Iterator[Priced]:
    """Yield the fastest wanted layout of each kind, fastest first, among the layouts that a search has priced.

    Equally fast layouts come in the order in which they were priced. Layouts whose bound is above the time of a layout
    of their kind are not simulated.
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
            heapq.heappush(heap, (one.step_time_s, index, True))


def _bounds(search: Search) -> list[float]:
    """Return a time that is at most the step time, for each layout that a search has priced."""
    if not search.exact:
        return []
    group, policy = (np.array(part) for part in zip(*search.exact, strict=True))
    first = bounds_s(search.problem, search.space.rows(group, policy)).tolist()
    return [max(bound, search.second_s(key)) for bound, key in zip(first, search.exact, strict=True)]

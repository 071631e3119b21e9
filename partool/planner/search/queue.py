"""Queue of layouts to be priced exactly, by lower bound; pipelined layouts get a second bound first."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partool.cost.case import SCHEDULES
from partool.planner.problem import Problem
from partool.planner.search.refine import refined
from partool.planner.search.score import fill_share
from partool.planner.search.space import Space
from partool.planner.search.span import listed
from partool.strategies.schedules import SCHEDULES as KNOWN

_TOGETHER, _WITH_LIMIT = 192, 2048
"""Maximum numbers of layouts that get second bounds at once, without and with a layout whose score limits the search;
all of these layouts have the same structure."""
Key = tuple[int, int]
"""Indices of a layout's group and policy."""


@dataclass
class SecondBounds:
    """Second bounds of pipelined layouts, from their own stages; searches of one space may share them."""

    bound_s: dict[Key, float] = field(default_factory=dict)
    """Lower bounds of step times; infinite for layouts that exceed the device's memory."""
    fill: dict[Key, float] = field(default_factory=dict)
    """Lower bounds of the share of the step time that filled memory costs."""


class Queue:
    """A priority queue of layouts; the layout with the least lower bound of the score comes first."""

    def __init__(self, problem: Problem, space: Space, second: SecondBounds | None = None) -> None:
        self._problem = problem
        self._second = SecondBounds() if second is None else second
        self._space, groups = space, space.groups
        self._columns = [
            np.broadcast_to(column, space.size)
            for column in (
                groups.schedule,
                groups.pp,
                groups.chunks,
                groups.in_flight,
                groups.accumulation,
                groups.compiled,
            )
        ]
        self._heap: list[tuple[float, int, int]] = []
        self._weight: dict[Key, float] = {}
        """Score as a multiple of the step time, without the share for filled memory, by layout."""
        self._settled: dict[Key, float] = {}
        """Final bounds, by layout."""
        self._structures: dict[int, tuple[int, ...]] = {}
        """Structures of the groups that came up."""
        self._coarse: dict[Any, dict[Key, float]] = defaultdict(dict)
        """First bounds of layouts, grouped by structure. A structure is a schedule with its pipeline ranks, chunks,
        limit of micro-batches in flight, and number of listed micro-batches, and whether blocks are compiled."""

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def least_s(self) -> float:
        """The smallest bound; infinite for an empty queue."""
        return self._heap[0][0] if self._heap else float("inf")

    def push(self, bounds_s: Any, weights: Any, groups: Any, policies: Any) -> None:
        """Add layouts, given as lower bounds of the score and as indices of groups and policies.

        ``weights`` are the scores as multiples of the step time, without the share for filled memory.
        """
        pp = self._columns[1]
        several = (pp[groups] > 1).tolist()
        rows = zip(bounds_s.tolist(), weights.tolist(), groups.tolist(), policies.tolist(), several, strict=True)
        for bound, weight, group, policy, pipelined in rows:
            key = (group, policy)
            if pipelined:
                self._coarse[self._structure(group)][key] = bound
                self._weight[key] = weight
            else:
                self._settled[key] = bound
            heapq.heappush(self._heap, (bound, *key))

    def pop(self, limit_s: float) -> Key | None:
        """Remove the entry with the least bound; return its layout if the bound is final, else None.

        A first bound is replaced by a second bound, which is final. Layouts of the same structure with first bounds
        below ``limit_s`` get second bounds at the same time.
        """
        bound, group, policy = heapq.heappop(self._heap)
        if (group, policy) in self._settled:
            return (group, policy) if self._settled[group, policy] <= bound else None
        waiting = self._coarse[self._structure(group)]
        most = _TOGETHER if limit_s == float("inf") else _WITH_LIMIT
        near = heapq.nsmallest(most, ((first, key) for key, first in waiting.items() if first <= limit_s))
        self._refine([key for _, key in near if key not in self._second.bound_s], limit_s)
        for first, key in near:
            second = self._second.bound_s[key] * (self._weight[key] + self._second.fill[key])
            self._settled[key] = max(first, second)
            if self._settled[key] > first:
                heapq.heappush(self._heap, (self._settled[key], *key))
            del waiting[key]
        popped = (group, policy)
        return popped if self._settled[popped] <= bound else None

    def _refine(self, keys: list[Key], limit_s: float) -> None:
        if not keys:
            return
        groups, policies = (np.array(part) for part in zip(*keys, strict=True))
        second = refined(self._problem, self._space.rows(groups, policies), limit_s)
        fill = fill_share(second.total_bytes, second.unfit, self._problem.devices.memory_bytes)
        bound_s = np.where(second.fits, second.bound_s, np.inf)
        self._second.bound_s.update(zip(keys, bound_s.tolist(), strict=True))
        self._second.fill.update(zip(keys, np.broadcast_to(fill, len(keys)).tolist(), strict=True))

    def _structure(self, group: int) -> Any:
        if group not in self._structures:
            schedule, pp, chunks, in_flight, m, compiled = (int(column[group]) for column in self._columns)
            name = SCHEDULES[schedule]
            count = listed(name, pp, m) if name in KNOWN else m
            self._structures[group] = schedule, pp, chunks, in_flight, count, compiled
        return self._structures[group]

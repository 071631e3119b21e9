"""Solution of a problem: the chosen layout, a faster layout that cannot run yet, and all layouts that were priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partool.plan.types import SearchSummary
from partool.planner.forms.gathers import under_pressure
from partool.planner.forms.runnable import runnable
from partool.planner.forms.tiles import in_tiles
from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Search, SearchResult
from partool.planner.search.enumeration import build
from partool.planner.search.offload import in_parts, refined, to_disks
from partool.planner.search.price import TIE, Priced, pinned_limit, room
from partool.planner.search.prices import firsts
from partool.planner.search.space import Space
from partool.planner.search.tiers import Tiered, by_tier

_NEAREST = 2048
"""Number of groups that are looked at for the fastest layout without a limit of memory."""
TOO_LARGE = "known to be too large, even with everything recomputed and offloaded"


@dataclass(frozen=True)
class Solution:
    """The results of the searches, and the layout that is taken."""

    problem: Problem
    space: Space
    search: Search
    """Search over all layouts."""
    overall: SearchResult
    able: SearchResult | None
    """Result of a second search, over runnable layouts only; None if the best layout can run, or if no layout can."""
    tiered: Tiered
    """Best layouts by tier of evidence, of the search that gave the chosen layout."""

    @property
    def chosen(self) -> Priced | None:
        """The best layout that can run; if no layout can, the best layout; None if nothing fits."""
        return (self.able.best if self.able is not None else None) or self.overall.best

    @property
    def better(self) -> Priced | None:
        """The best layout of all, if it cannot run but is faster or more sure to fit than the chosen layout."""
        chosen, best = self.chosen, self.overall.best
        if chosen is None or best is None or best is chosen:
            return None
        faster = best.step_time_s < chosen.step_time_s * (1.0 - TIE)
        return best if faster or (best.safe and not chosen.safe) else None

    @cached_property
    def fastest(self) -> Priced | None:
        """The layout with the least lower bound of time that needs no more than twice the memory.

        Only the first groups by their bounds are looked at, with the policy that recomputes and offloads least.
        """
        near = np.argsort(self.search.bound_s, kind="stable")[:_NEAREST]
        near = near[np.isfinite(self.search.bound_s[near])]
        if not len(near):
            return None
        needed = room(self.problem, self.space.rows(near, np.zeros(len(near), dtype=int))).total_bytes
        may_fit = np.flatnonzero(np.asarray(needed) <= 2.0 * self.problem.devices.memory_bytes)
        return self.search.price(int(near[may_fit[0]]), 0) if len(may_fit) else None

    def summary(self) -> SearchSummary:
        """Return the numbers of layouts that were enumerated, pruned, evaluated and simulated, for the plan."""
        results = [self.overall, *([self.able] if self.able is not None else [])]
        pruned = dict(self.space.pruned)
        if self.overall.too_large:
            pruned[TOO_LARGE] = self.overall.too_large
        pruned = dict(sorted(pruned.items(), key=lambda item: (-item[1], item[0])))
        policies = len(self.space.policies)
        keys = [result.leaves.group * policies + result.leaves.policy for result in results]
        return SearchSummary(
            enumerated=self.space.enumerated,
            pruned=pruned,
            evaluated=self.search.evaluated,
            fitting=len(firsts(np.concatenate(keys))),
            simulated=len(self.search.exact),
        )


def solve(problem: Problem) -> Solution:
    """Search all layouts, and if the best layout cannot run, also search the layouts that can run.

    If no layout is sure to fit, the search is repeated with offloaded optimizer state split between device and host,
    with gathers that need least memory, with tiles of sequences, and with state in files, if the spec names a folder.
    If no layout fits in the pinned memory that the spec allows, the limit is dropped, so that a finding can say how
    much pinned memory is needed.
    """
    solution = _solved(problem)
    if solution.chosen is None and pinned_limit(problem) != float("inf"):
        return _solved(problem.relax("pinned"))
    return solution


def _solved(problem: Problem) -> Solution:
    solution = _solve(problem)
    for harder in harder_ones(problem):
        if solution.chosen is not None and solution.chosen.safe:
            break
        relaxed = _solve(harder)
        solution = relaxed if _rank(relaxed.chosen) > _rank(solution.chosen) else solution
    return solution


def harder_ones(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with more and more constraints relaxed to save memory at the cost of time."""
    parts = in_parts(problem)
    last = parts or problem
    problems = (parts, under_pressure(last), in_tiles(last), to_disks(last), to_disks(_smallest(last)))
    yield from (one for at, one in enumerate(problems) if one is not None and one not in problems[:at])


def _smallest(problem: Problem) -> Problem:
    return in_tiles(problem) or under_pressure(problem) or problem


def _rank(priced: Priced | None) -> int:
    """Return 0 for no layout, 1 if the layout does not fit, 2 if it is predicted to fit, 3 if it is sure to fit."""
    return 0 if priced is None else 1 + priced.fits + priced.safe


def _solve(problem: Problem) -> Solution:
    problem.budget.subject = f"layouts on {problem.world_size:,} devices"
    space = build(problem)
    search = Search(problem, space)
    search.bound()
    tiered = by_tier(problem, space, search)
    overall, able = tiered.taken, None
    if bool(np.any(space.runnable)) and bool(np.any(space.runnable_policies)):
        best = overall.best
        if best is None or not runnable(problem, best.layout):
            runnable_tiers = by_tier(problem, space, search, space.runnable, space.runnable_policies)
            tiered, able = (
                (runnable_tiers, runnable_tiers.taken)
                if runnable_tiers.taken.best is not None
                else (tiered, runnable_tiers.taken)
            )
    for result in (overall, able):
        if result is not None and result.best is not None:
            before, result.best = result.best, refined(result.best)
            tiered = tiered.with_refined(before, result.best)
    return Solution(problem, space, search, overall, able, tiered)


def may_fit(problem: Problem) -> bool:
    """Return False if no layout fits even with most recomputation and offload; this check is faster than a search."""
    problem = _smallest(in_parts(problem) or problem)
    problem = to_disks(problem) or problem
    space = build(problem)
    return space.size > 0 and Search(problem, space).could_fit()

"""Solution of a problem: the chosen layout, a faster layout that cannot run yet, and all layouts that were priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import Layouts
from partool.cost.repeats import codes
from partool.plan.types import SearchSummary
from partool.planner.forms.gathers import under_pressure
from partool.planner.forms.runnable import runnable
from partool.planner.forms.tiles import in_tiles
from partool.planner.forms.tiles import sizes as tile_sizes
from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build, rebuilt
from partool.planner.search.glance import glance
from partool.planner.search.leaves import CROWDED, SearchResult, crowded
from partool.planner.search.offload import to_disks
from partool.planner.search.price import Priced, host_limit, least_room, pinned_limit, room, room_below
from partool.planner.search.prices import firsts
from partool.planner.search.score import ScoreWeights
from partool.planner.search.space import GROUP_COLUMNS, Space

NEARLY = 0.01
"""Share by which the score of a layout that the plan is compared with may be above the least of its kind."""
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
    unrelaxed: Solution | None = None
    """The solution without relaxed constraints; None if this is it."""

    @property
    def plain(self) -> Solution:
        """The solution without relaxed constraints."""
        return self if self.unrelaxed is None else self.unrelaxed

    @property
    def chosen(self) -> Priced | None:
        """The best layout that can run; if no layout can, the best layout; None if nothing fits."""
        return (self.able.best if self.able is not None else None) or self.overall.best

    @property
    def better(self) -> Priced | None:
        """The best layout of all, if it cannot run but is better than the chosen layout."""
        chosen, best = self.chosen, self.overall.best
        return None if chosen is None or best is chosen else best

    @cached_property
    def on_paper(self) -> Priced | None:
        """A layout that is faster than the chosen one if predictions of mechanisms do not err; None without one.

        It is the best of a few that a short look finds.
        """
        chosen = self.chosen
        if chosen is None:
            return None
        some, few = self._comparable(None, None)
        search = Search(self.problem, self.space, some, few, self.search, proven=False)
        return glance(search, self.search, chosen.paper_s * (1.0 - NEARLY))

    def without(self, groups: Any = None, policies: Any = None) -> SearchResult | None:
        """Return the result of a search of the groups and policies in two masks (None: all); None if none can run.

        The score of its best layout may be above the least by the share :data:`NEARLY`.
        """
        some, few = self._comparable(groups, policies)
        if not (some.any() and few.any()):
            return None
        return Search(self.problem, self.space, some, few, self.search, gap=NEARLY).run()

    def _comparable(self, groups: Any, policies: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks of groups and policies, of those that can run if the chosen layout can."""
        space, chosen = self.space, self.chosen
        some = np.ones(space.size, bool) if groups is None else np.asarray(groups)
        few = np.ones(len(space.policies), bool) if policies is None else np.asarray(policies)
        if chosen is not None and runnable(self.problem, chosen.layout):
            return some & space.runnable, few & space.runnable_policies
        return some, few

    @property
    def least_s(self) -> float:
        """Lower bound of the step time of all layouts that may fit, in seconds; infinite if none may."""
        return float(self.search.bound_s.min(initial=float("inf")))

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

    Unless their bound rules them out, layouts with settings that save memory are searched as well: gathers that need
    least memory, tiles of sequences, and state in files, if the spec names a folder.
    If no layout fits in the pinned memory that the spec allows, the limit is dropped, so that a finding can say how
    much pinned memory is needed.
    """
    solution = _solved(problem)
    if solution.chosen is None and pinned_limit(problem) != float("inf"):
        return _solved(problem.relax("pinned"))
    return solution


def _solved(problem: Problem) -> Solution:
    plain = solution = _solve(problem)
    for harder in harder_ones(problem):
        best = solution.chosen
        if best is not None and not _may_help(harder, plain, best.score_s):
            continue
        # Bounds of groups hold under relaxed gathers; tiles lower some of them.
        gathers_alone = harder.relaxed - problem.relaxed <= {"gathers"}
        if best is not None and gathers_alone and not _finds(harder, plain, best.score_s):
            continue
        relaxed = _solve(harder) if best is None else _solve(harder, best.score_s, plain.space)
        if relaxed.chosen is not None and (best is None or _better(relaxed.chosen, best)):
            # Only a whole search has the bounds of all groups, and counts of what was ruled out.
            relaxed = relaxed if best is None else _solve(harder)
            solution = replace(relaxed, unrelaxed=plain)
    return solution


def _better(one: Priced, other: Priced) -> bool:
    """Return True if a layout has the better score and can run where the other can."""
    can_run = runnable(one.problem, one.layout) or not runnable(other.problem, other.layout)
    return can_run and one.score_s < other.score_s


def _may_help(harder: Problem, plain: Solution, limit_s: float) -> bool:
    """Return False if no layout that fits only with relaxed constraints can have a score below ``limit_s``.

    ``plain`` is the solution without them. Relaxed constraints cost time, so the bounds of plain layouts hold.
    """
    results = [one for one in (plain.overall, plain.able) if one is not None]
    group, policy = crowded(results, limit_s)
    if len(group):
        most_bytes, most_host_bytes = harder.capacity_bytes * plain.search.slack(group), host_limit(harder)
        need = room_below(harder, _relaxed(harder, plain.space, group, policy), most_bytes, most_host_bytes)
        fits = np.asarray(need.total_bytes) <= most_bytes
        if np.any(fits & (np.asarray(need.host_bytes) <= most_host_bytes)):
            return True
    return _left_out_may_help(harder, plain, limit_s)


def _left_out_may_help(harder: Problem, plain: Solution, limit_s: float) -> bool:
    """Return False if no group that was too large under every policy can have a score below ``limit_s`` if relaxed."""
    search, space = plain.search, plain.space
    if not len(search.least_bytes):
        return False
    limit = harder.capacity_bytes * search.slack(search.groups)
    groups = search.groups[(search.least_bytes > limit) & (search.least_bytes <= CROWDED * limit)]
    if not len(groups):
        return False
    sparing = search.sparing(groups)
    least = least_room(harder, _relaxed(harder, space, groups, sparing), limit[groups])
    groups = groups[least <= limit[groups]]
    weights = ScoreWeights.of(harder, space.groups, space.size, space.policies)
    times_s = search.group_bounds(groups) if len(groups) else np.zeros(0)
    return bool(np.any(times_s * (1.0 + weights.group[groups] + weights.policy.min()) <= limit_s))


def _relaxed(harder: Problem, space: Space, group: Any, policy: Any) -> Layouts:
    """Return layouts of a space with the tiles and the compiled blocks of a problem with relaxed constraints."""
    rows = space.rows(group, policy)
    networks, losses = tile_sizes(harder, rows)
    compiled = rows.compiled * (harder.compile == "block")
    return rows.with_columns(mlp_tile_tokens=networks, loss_tile_tokens=losses, compiled=compiled)


def _finds(harder: Problem, plain: Solution, limit_s: float) -> bool:
    """Return False if a search with relaxed constraints finds no layout with a score up to ``limit_s``.

    Groups whose bound without them exceeds it are left out, as in :func:`_may_help`. Those that did not fit have none.
    """
    space = rebuilt(harder, plain.space)
    bound_s = _bounds_in(space, plain)
    weights = ScoreWeights.of(harder, space.groups, space.size, space.policies)
    scores = bound_s * (1.0 + weights.group + weights.policy.min(initial=0.0))
    return Search(harder, space, scores <= limit_s, limit_s=limit_s).run().best is not None


def _bounds_in(space: Space, plain: Solution) -> NDArray[np.float64]:
    """Return the bounds of ``plain`` for the groups of another space in seconds; 0 where it has none.

    Of a group with and without compiled blocks, the lower bound counts.
    """
    finite_s = np.where(np.isfinite(plain.search.bound_s), plain.search.bound_s, 0.0)
    plain_codes, code = _codes(plain.space), _codes(space)
    order = np.lexsort((finite_s, plain_codes))
    at = order[np.minimum(np.searchsorted(plain_codes[order], code), len(order) - 1)]
    return np.where(plain_codes[at] == code, finite_s[at], 0.0)


def _codes(space: Space) -> NDArray[np.int64]:
    return codes(space.size, [getattr(space.groups, name) for name in GROUP_COLUMNS])


def harder_ones(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with more and more constraints relaxed to save memory at the cost of time."""
    problems = (under_pressure(problem), in_tiles(problem), to_disks(problem), to_disks(_smallest(problem)))
    yield from (one for at, one in enumerate(problems) if one is not None and one not in problems[:at])


def _smallest(problem: Problem) -> Problem:
    return in_tiles(problem) or under_pressure(problem) or problem


def _solve(problem: Problem, limit_s: float = float("inf"), plain: Space | None = None) -> Solution:
    """Return the solution of one problem; layouts with a score above ``limit_s`` are not looked for.

    ``plain`` is the space without relaxed constraints, if the problem has some.
    """
    problem.budget.subject = f"layouts on {problem.world_size:,} devices"
    space = build(problem) if plain is None else rebuilt(problem, plain)
    search = Search(problem, space, limit_s=limit_s)
    search.bound()
    overall, able = search.run(), None
    best = overall.best
    can_run = bool(np.any(space.runnable)) and bool(np.any(space.runnable_policies))
    if can_run and best is not None and not runnable(problem, best.layout):
        some, few = space.runnable, space.runnable_policies
        able = Search(problem, space, some, few, search, limit_s=limit_s).run()
    return Solution(problem, space, search, overall, able)


def may_fit(problem: Problem) -> bool:
    """Return False if no layout fits even with most recomputation and offload; this check is faster than a search."""
    problem = _smallest(problem)
    problem = to_disks(problem) or problem
    space = build(problem)
    return space.size > 0 and Search(problem, space).could_fit()

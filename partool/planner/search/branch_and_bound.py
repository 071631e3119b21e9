"""Branch and bound over the search space: price only some layouts exactly to find the fastest that is sure to fit.

Groups are visited in the order of a lower bound of their step time. A group is expanded into its policies, which are
priced with the closed equations; layouts that fit enter a queue by their own bound and are priced exactly, best first.
The search ends when no bound is below the best exact time: no remaining layout can be faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.memory.fit import GREEN
from partool.cost.stacks import PARTOOL
from partool.cost.time.bound import Open
from partool.cost.time.offload import FAST_LINK
from partool.planner.explain.summary import TIE
from partool.planner.problem import Problem
from partool.planner.search.cost_job import cost_job
from partool.planner.search.layouts import layout_of, simplicity
from partool.planner.search.price import Priced, bounds_s, host_limit, least_room, prepare, room, room_below
from partool.planner.search.queue import Key, Queue, SecondBounds
from partool.planner.search.space import Space

SLACK = 0.03
"""Relative error by which the closed equations may exceed the exact memory; layouts that exceed the memory limit
by a smaller share are kept."""
_MOST_SLACK = 0.5
"""Upper limit of the relative error that is added to ``SLACK`` for several pipeline stages and a large head."""
LIKELY = GREEN - 0.05
"""Least probability of fitting, by the closed equations, that layouts need in a search for layouts that surely fit."""
_CHUNK = 8192
_MORE = 65536
"""Number of layouts whose memory is priced at once; more repeat each other more often."""
_AT_FIRST, _MOST_AT_ONCE = 32, 512
"""Numbers of groups expanded at once, at first and at most; the first groups lower the time limit, which saves pricing
later groups."""
_PREPARED = 512
"""Maximum number of groups whose micro-batches are priced at the beginning of a pass, as many as most passes expand."""
_EXACT_ROWS = 3_000
"""Number of layouts that the closed equations price in the time of one exact price."""
_MOST_WORK = 3_000_000
"""Maximum number of rows that a pass prices (in about 30 s): three times the number for the largest published runs."""
_ON_DEVICE: dict[str, Any] = {"gpu_fraction": 1.0, "offload_parameters": 0, "offload_activations": 0}
"""Columns of layouts that offload nothing."""
_HURRIED = 500
"""Maximum number of queued layouts that are tried when the user has stopped a search that has found none."""


def firsts(codes: Any) -> Any:
    """Return the index of the first occurrence of each distinct value of ``codes``; the result is sorted by value.

    ``numpy.unique`` is not used, as it would import masked arrays.
    """
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    return order[np.concatenate([np.ones(min(len(codes), 1), dtype=bool), ordered[1:] != ordered[:-1]])]


@dataclass
class Leaves:
    """Layouts that fit according to the closed equations, with prices; each field has one entry per layout."""

    group: NDArray[np.int64]
    policy: NDArray[np.int64]
    bound_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    probability: NDArray[np.float64]
    host_bytes: NDArray[np.float64]

    @classmethod
    def join(cls, parts: list[Leaves]) -> Leaves:
        """Return the leaves of all parts, concatenated."""
        names = ("group", "policy", "bound_s", "memory_bytes", "probability", "host_bytes")
        if not parts:
            return cls(*(np.zeros(0, dtype=int if name in ("group", "policy") else float) for name in names))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.group)


@dataclass
class SearchResult:
    """The result of a search."""

    best: Priced | None
    """The fastest layout that is sure to fit; if there is none, the fastest layout that is predicted to fit."""
    leaves: Leaves = field(default_factory=lambda: Leaves.join([]))
    too_large: int = 0
    """Number of layouts in groups whose bound of memory is too large even with everything recomputed and offloaded."""
    complete: bool = True
    """False if the search ended at its limit of work: layouts that the search did not reach may be faster."""


class Search:
    """One search over some of the groups and some of the policies of a space."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        groups: Any = None,
        policies: Any = None,
        shared: Search | None = None,
        *,
        limit_s: float = float("inf"),
        searched: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = None,
    ) -> None:
        """Prepare a search of the groups and policies in two masks (None: all) that shares the prices of ``shared``.

        Layouts that take more than ``limit_s`` seconds are not looked for, and neither are layouts of which both group
        and policy are in the masks ``searched``.
        """
        self.problem = problem
        self.space = space
        self.groups = np.arange(space.size) if groups is None else np.flatnonzero(groups)
        self.policies = np.arange(len(space.policies)) if policies is None else np.flatnonzero(policies)
        self._shared = shared
        self._searched = searched
        self.found = SearchResult(None)
        self.exact: dict[Key, Priced] = {} if shared is None else shared.exact
        """Exact prices by group and policy; searches of one space may share them."""
        self._second: SecondBounds = SecondBounds() if shared is None else shared._second
        self._seen: NDArray[np.bool_] = shared._seen if shared else np.zeros((space.size, len(space.policies)), bool)
        """Mask of the pairs (group, policy) whose bound has been computed; searches of one space may share the mask."""
        self._left_out = np.zeros(space.size, dtype=bool)
        """Mask of groups that are too large under every policy."""
        self._settled: list[Priced] = []
        self.bound_s: NDArray[np.float64] = np.zeros(0)
        """Lower bound of each group's step time in seconds."""
        self.least_bytes: NDArray[np.float64] = np.zeros(0)
        """Bytes of device memory that each group needs at least, or fewer."""
        self._parts: list[Leaves] = []
        self._start_s = limit_s
        self._limit_s = limit_s
        self._queue = Queue(problem, space, self._second)

    def run(self, *, only_sure: bool = False) -> SearchResult:
        """Return a result with the best layout that is sure to fit; if there is none, with the best that may fit.

        With ``only_sure``, layouts that may fit are not looked for.
        """
        if self._shared is not None and self._start_s < float("inf"):
            # The bounds of the shared search hold under all policies, and so under fewer.
            near = self._shared.bounds_of(self.groups) <= self._start_s * (1.0 + TIE)
            self.groups = self.groups[near]
        if len(self.groups) and len(self.policies):
            self.least_bytes, likely = self.least_memory(self.groups)
            self.bound_s = self._group_bounds(self.groups)
            for sure in (True,) if only_sure else (True, False):
                self._pass(likely, sure=sure)
                if self.found.best is not None:
                    break
        if self.problem.work.stopped and not self.problem.work.settled:
            raise KeyboardInterrupt
        self.found.leaves = Leaves.join(self._parts)
        return self.found

    def bound(self) -> None:
        """Bound the least memory and the least time of every group, and count the groups that are too large.

        The time of a group that is too large is infinite, unless all groups are too large.
        """
        if len(self.groups) and len(self.policies):
            self.problem.work.rows += len(self.groups)
            most, sparing = self.problem.capacity_bytes * self._slack(self.groups), self._sparing(self.groups)
            self.least_bytes = np.concatenate(
                [
                    least_room(self.problem, self.space.rows(self.groups[part], sparing[part]), most[part])
                    for part in (slice(start, start + _MORE) for start in range(0, len(self.groups), _MORE))
                ]
            )
            may = self.least_bytes <= most
            self._count_too_large(may)
            timed = may if may.any() else np.ones_like(may)
            self.bound_s = np.full(len(self.groups), np.inf)
            self.bound_s[timed] = self._group_bounds(self.groups[timed])

    def bounds_of(self, groups: Any) -> Any:
        """Return the lower bounds of the step time of some groups of the space; this search has bounds of all groups.

        Raises ``ValueError`` where :meth:`bound` has not been called, or the search has not all groups.
        """
        if len(self.bound_s) != self.space.size:
            raise ValueError("only a search of all groups, whose bounds are known, can be shared")
        return self.bound_s[groups]

    def _count_too_large(self, may: NDArray[np.bool_]) -> None:
        self._left_out[self.groups[~may]] = True
        self.found.too_large = self.space.count(self._left_out, self.policies)

    def second_s(self, key: Key) -> float:
        """Return the second bound of a layout's step time; 0 if the search has not needed it."""
        return self._second.bound_s.get(key, 0.0)

    @property
    def evaluated(self) -> int:
        """Number of layouts whose bounds were computed, minus those that are counted as too large."""
        groups = np.flatnonzero(self._seen.any(axis=1) & ~self._left_out)
        return int((self._seen[groups] & self.space.counted(groups)).sum())

    def price(self, group: int, policy: int) -> Priced:
        """Return the exact price of one layout."""
        key = (int(group), int(policy))
        if key not in self.exact:
            self.problem.work.rows += _EXACT_ROWS
            self.exact[key] = Priced(self.problem, layout_of(self.problem, self.space.rows(*key)))
        return self.exact[key]

    def least_memory(self, groups: Any) -> tuple[Any, Any]:
        """Return the least bytes of device memory that each group needs, and the probability that these bytes fit."""
        total, likely, _ = self._room(groups, self._sparing(groups))
        return total, likely

    def fastest_that_fits(self, groups: Any, slack: float = SLACK) -> int | None:
        """Return the group with the least bound of time among those that fit under some policy; None if none fits.

        This search has bounds of all groups. ``slack`` is the share by which memory may be exceeded.
        """
        capacity = self.problem.capacity_bytes * (1.0 + slack)
        may = groups[self.least_bytes[groups] <= capacity]
        order = may[np.argsort(self.bound_s[may], kind="stable")]
        for start in range(0, len(order), _CHUNK):
            near = order[start : start + _CHUNK]
            fits = np.flatnonzero(self.least_memory(near)[0] <= capacity)
            if len(fits):
                return int(near[fits[0]])
        return None

    def _sparing(self, groups: Any) -> Any:
        """Return, for each group, the policy that needs least device memory."""
        table, zero3 = self.space.policies, np.asarray(self.space.groups.zero)[groups] == 3
        stays = self.policies[table.parameters[self.policies] == 0]
        policy = np.full(len(groups), stays[-1] if len(stays) else self.policies[-1])
        if (table.parameters[self.policies] == 1).any():
            policy[zero3] = self.policies[-1]
        return policy

    def least_times(self) -> Any:
        """Return a lower bound of each group's step time in seconds, whether the group fits or not."""
        return self._group_bounds(self.groups)

    def could_fit(self) -> bool:
        """Return True if some layout fits device and host memory under one of the policies that save most memory."""
        for policy in self.extremes():
            groups = self.groups[self.space.goes(self.groups, np.full(len(self.groups), policy))]
            total, _, host = self._room(groups, np.full(len(groups), policy))
            fits = (total <= self.problem.capacity_bytes * self._slack(groups)) & (host <= host_limit(self.problem))
            if fits.any():
                return True
        return False

    def smallest(self) -> tuple[int, int]:
        """Return the indices of group and policy of the layout that needs least device memory.

        If a layout exceeds host memory, the host memory that it needs is added to its device memory.
        """
        found = []
        for policy in self.extremes():
            groups = self.groups[self.space.goes(self.groups, np.full(len(self.groups), policy))]
            total, _, host = self._room(groups, np.full(len(groups), policy), exact=True)
            if len(groups):
                worst = np.where(host <= host_limit(self.problem), total, total + host)
                found.append((float(worst.min()), int(groups[np.argmin(worst)]), policy))
        return min(found)[1:]

    def extremes(self) -> list[int]:
        """Return the indices of policies that save most device memory, sorted by their use of host memory."""
        table = self.space.policies
        moved = 1.0 - table.gpu_fraction + table.parameters + table.activations
        here = self.policies[moved[self.policies] == moved[self.policies].min()]
        stays = self.policies[table.parameters[self.policies] == 0]
        parts = [stays[table.gpu_fraction[stays] == part] for part in sorted(set(table.gpu_fraction[stays].tolist()))]
        return sorted({int(here[-1]), int(self.policies[-1]), *(int(part[-1]) for part in parts)})

    def columns(self, group: Any, policy: Any, least_likely: float = 0.0) -> tuple[Any, Any]:
        """Return the layouts' lower bounds of time and device memory.

        Both are infinite where device or host memory is exceeded, or fitting is less probable than ``least_likely``.
        """
        total, likely, host = self._room(group, policy, host_too=True)
        fits = (total <= self.problem.capacity_bytes) & (host <= host_limit(self.problem)) & (likely >= least_likely)
        bound = np.full(len(group), np.inf)
        bound[fits] = self._bounds(group[fits], policy[fits])
        return bound, np.where(fits, total, np.inf)

    def _slack(self, groups: Any) -> Any:
        """Return the factor by which the closed equations may exceed the exact memory of a group's layouts.

        The closed equations split layers evenly; if the head costs as much as several layers, the last stage gets fewer
        layers. If the spec pins the layers of stages or gives its own schedule, the factor is ``1 + _MOST_SLACK``.
        """
        model = self.problem.model
        head = model.vocab * model.hidden / max(self.problem.layer_elements, 1)
        pp = np.asarray(self.space.groups.pp)[groups]
        if self.problem.stage_layers is not None or self.problem.lists is not None:
            return np.where(pp > 1, 1.0 + _MOST_SLACK, 1.0 + SLACK)
        return 1.0 + SLACK + np.where(pp > 1, np.minimum(head * pp / model.layers, _MOST_SLACK), 0.0)

    def _group_bounds(self, groups: Any) -> Any:
        """Return a lower bound of each group's step time under any policy: recompute least, and offload for nothing."""
        bases = self.policies[:1]
        if self.problem.mlp_tile:
            # A tiled network recomputes in any case, and may take longer than a whole one.
            bases = self.policies[firsts(self._recompute)]
        found = [self._bare(groups, np.full(len(groups), policy), recompute=True) for policy in bases]
        return np.min(found, axis=0)

    @property
    def _recompute(self) -> Any:
        """One number per policy of the search, which says what is recomputed."""
        table = self.space.policies
        return table.recompute[self.policies] * 1000 + table.share[self.policies]

    def _bare(self, groups: Any, policy: Any, *, recompute: bool = False) -> Any:
        """Return lower bounds of the step time of layouts that recompute as ``policy`` says, whatever they offload.

        With ``recompute``, the bounds also hold for policies that take longer. Over most links the host's update costs
        as much as the device's update that it replaces, or more. Over a fast link, where host and device are the same
        CPU, and in other code bases, it may cost nothing where other work hides it.
        """
        devices = self.problem.devices
        fast = devices.backend == "cpu" or (devices.host_link_bytes_per_s or 0.0) >= FAST_LINK
        fast |= cost_job(self.problem).stack.name != PARTOOL.name
        least = float(self.space.policies.gpu_fraction[self.policies].min()) if fast else 1.0
        return self._bounds(groups, policy, Open(least, recompute))

    def _pass(self, likely: Any, *, sure: bool) -> None:
        """Search the layouts that are sure to fit if ``sure``, else the layouts that are predicted to fit."""
        bound = self.bound_s
        slack = self._slack(self.groups)
        may = self.least_bytes <= self.problem.capacity_bytes * slack
        if sure:
            self._count_too_large(may)
            may &= (likely >= LIKELY) | (slack > 1.0 + SLACK)
        order = np.flatnonzero(may)[np.argsort(bound[may], kind="stable")]
        self._limit_s = self._start_s
        self._queue = Queue(self.problem, self.space, self._second)
        self._prepare(self.groups[order[bound[order] <= self._limit_s * (1.0 + TIE)][:_PREPARED]])
        position, batch = 0, _AT_FIRST if self._limit_s == float("inf") else _MOST_AT_ONCE
        start = self.problem.work.rows
        while not self._worked_enough(start):
            following = bound[order[position]] if position < len(order) else float("inf")
            if self._queue.least_s <= following:
                if self._queue.least_s > self._limit_s * (1.0 + TIE) or not self._queue:
                    break
                found = self._queue.pop(self._limit_s * (1.0 + TIE))
                if found is not None and not (sure and found in self._second.unsafe):
                    self._settle(self.price(*found), sure=sure)
            elif following <= self._limit_s * (1.0 + TIE):
                self._expand(self.groups[order[position : position + batch]], sure=sure)
                position, batch = position + batch, min(2 * batch, _MOST_AT_ONCE)
            else:
                break
        if self.problem.work.stopped:
            self._hurry(sure=sure)

    def _prepare(self, groups: Any) -> None:
        """Price the micro-batches of groups that will be expanded at once, which takes less time than one by one."""
        one = self.policies[firsts(self._recompute)]
        group, policy = np.repeat(groups, len(one)), np.tile(one, len(groups))
        allowed = self.space.allowed(group, policy)
        prepare(self.problem, replace(self.space.rows(group[allowed], policy[allowed]), **_ON_DEVICE))

    def _hurry(self, *, sure: bool) -> None:
        """Take the first layout of the queue that fits, if none has been taken before the user stopped the search."""
        for _ in range(_HURRIED):
            if self.found.best is not None or not self._queue:
                break
            found = self._queue.pop(float("inf"))
            if found is not None:
                self._settle(self.price(*found), sure=sure)

    def _worked_enough(self, start: int) -> bool:
        """Return True if a pass that began after ``start`` rows of work has reached its limit.

        The limit is twice as high while no layout has been found, as the plan would otherwise report that nothing fits.
        """
        work = self.problem.work
        most = start + (_MOST_WORK if self._settled else 2 * _MOST_WORK)
        if work.rows <= min(most, work.until):
            return False
        self.found.complete, work.cut = False, True
        return True

    def _settle(self, priced: Priced, *, sure: bool) -> None:
        """Take a layout as the best so far if it fits and is faster than the best, or as fast and simpler."""
        if not (priced.safe if sure else priced.fits):
            return
        time_s = priced.step_time_s
        if time_s > self._limit_s * (1.0 + TIE):
            return
        self._limit_s = min(self._limit_s, time_s)
        self.problem.work.settled, self.problem.work.best_s = True, self._limit_s
        self._settled = [p for p in [*self._settled, priced] if p.step_time_s <= self._limit_s * (1.0 + TIE)]
        self.found.best = min(self._settled, key=lambda p: (simplicity(self.problem, p.layout), p.step_time_s))

    def _expand(self, groups: Any, *, sure: bool) -> None:
        """Price the layouts of ``groups`` that may still be the fastest, and queue those that fit."""
        least = self._policy_bounds(groups)
        open_ = (least <= self._limit_s * (1.0 + TIE)) & self.space.allowed(groups[:, None], self.policies[None, :])
        if self._searched is not None:
            old_groups, old_policies = self._searched
            open_ &= ~(old_groups[groups][:, None] & old_policies[self.policies][None, :])
        which, column = np.nonzero(open_)
        group, policy = groups[which], self.policies[column]
        total, likely, host = self._room(group, policy, host_too=True)
        fits = (total <= self.problem.capacity_bytes * self._slack(group)) & (host <= host_limit(self.problem))
        group, policy = group[fits], policy[fits]
        leaves = Leaves(group, policy, self._bounds(group, policy), total[fits], likely[fits], host[fits])
        self._parts.append(leaves)
        queued = leaves.bound_s <= self._limit_s * (1.0 + TIE)
        if sure:
            queued &= (leaves.probability >= LIKELY) | (self._slack(group) > 1.0 + SLACK)
        queued &= ~self._dominated(leaves, queued)
        self.problem.work.likely |= bool(queued.any())
        self._queue.push(leaves.bound_s[queued], group[queued], policy[queued])

    def _policy_bounds(self, groups: Any) -> Any:
        """Return a matrix of lower bounds of the step time, with a row per group and a column per policy.

        A policy's bound holds for every offload.
        """
        recompute = self._recompute
        one = firsts(recompute)
        many = np.repeat(groups, len(one))
        times = self._bare(many, np.tile(self.policies[one], len(groups))).reshape(len(groups), len(one))
        return times[:, np.searchsorted(recompute[one], recompute)]

    def _dominated(self, leaves: Leaves, queued: Any) -> Any:
        """Return a mask of leaves that a queued leaf of the same group dominates.

        The dominating leaf is at least as fast, recomputes and offloads no more, and is sure to fit. Only without
        pipeline ranks, and with whole networks, do bounds differ from exact times by the same amount.
        """
        table = self.space.policies
        out = np.zeros(len(leaves), dtype=bool)
        # A layout over the limit by less than the slack may not fit after all, so it must not rule out others.
        fits = leaves.memory_bytes <= self.problem.capacity_bytes
        known = (np.asarray(self.space.groups.pp) == 1)[leaves.group] & (not self.problem.mlp_tile)
        index = np.flatnonzero(queued & (leaves.probability >= 0.999) & fits & known)
        for start in np.split(index, np.flatnonzero(np.diff(leaves.group[index])) + 1):
            if len(start) == 0:
                continue
            policy = leaves.policy[start]
            values = [table.recompute, -table.gpu_fraction, table.parameters, table.activations]
            least = np.ones((len(start), len(start)), dtype=bool)
            for column in values:
                least &= column[policy][:, None] <= column[policy][None, :]
            share = table.share[policy]
            least &= (table.recompute[policy] == 0)[:, None] | (share[:, None] <= share[None, :])
            least &= leaves.bound_s[start][:, None] <= leaves.bound_s[start][None, :]
            np.fill_diagonal(least, False)
            least &= ~(least.T & (np.arange(len(start))[:, None] > np.arange(len(start))[None, :]))
            out[start] = least.any(axis=0)
        return out

    def _bounds(self, group: Any, policy: Any, left: Open | None = None) -> Any:
        """Return lower bounds of the step time; ``left`` names choices that the bounds leave open."""
        self._seen[group, policy] = True
        self.problem.work.rows += len(group)
        if len(group) > _CHUNK:
            rows = self.space.rows(group, policy)
            prepare(self.problem, rows if left is None else replace(rows, **_ON_DEVICE))
        parts = []
        for i in range(0, len(group), _CHUNK):
            rows = self.space.rows(group[i : i + _CHUNK], policy[i : i + _CHUNK])
            rows = rows if left is None else replace(rows, **_ON_DEVICE)
            parts.append(bounds_s(self.problem, rows, left))
        return np.concatenate(parts) if parts else np.zeros(0)

    def _room(self, group: Any, policy: Any, *, exact: bool = False, host_too: bool = False) -> tuple[Any, Any, Any]:
        """Return bytes of device memory, the probability that they fit, and bytes of host memory of some layouts.

        Unless all are to be ``exact``, layouts that are too large by far may get fewer bytes, by which they still are
        too large. With ``host_too``, layouts that are too large for the host may get infinite bytes of it.
        """
        self.problem.work.rows += len(group)
        most = self.problem.capacity_bytes * np.broadcast_to(self._slack(group), len(group))
        most_host = host_limit(self.problem) if host_too else float("inf")
        parts = []
        for i in range(0, len(group), _MORE):
            rows = self.space.rows(group[i : i + _MORE], policy[i : i + _MORE])
            parts.append(
                room(self.problem, rows) if exact else room_below(self.problem, rows, most[i : i + _MORE], most_host)
            )
        if not parts:
            return np.zeros(0), np.zeros(0), np.zeros(0)
        return tuple(
            np.concatenate([np.broadcast_to(getattr(part, name), np.shape(part.total_bytes)) for part in parts])
            for name in ("total_bytes", "probability", "host_bytes")
        )  # type: ignore[return-value]

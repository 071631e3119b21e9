"""Branch and bound over the search space: price only some layouts exactly to find the one with the least score.

Groups are visited in the order of a lower bound of their score (:mod:`partool.planner.search.score`). A group is
expanded into its policies, which are priced with the closed equations; layouts that may fit enter a queue by their own
bound and are priced exactly, best first. The search ends when no bound is below the best exact score.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.planner.problem import Problem, Stopped
from partool.planner.search.dominance import dominated
from partool.planner.search.layouts import layout_of
from partool.planner.search.leaves import CROWDED, Leaves, SearchResult
from partool.planner.search.price import SLACK, Priced, host_limit
from partool.planner.search.prices import PRICED_AT_ONCE, Prices, firsts
from partool.planner.search.queue import Key, Queue, SecondBounds
from partool.planner.search.score import ScoreWeights, fill_share
from partool.planner.search.space import Space
from partool.planner.search.stages import stages

_AT_FIRST, _MOST_AT_ONCE, _WITH_LIMIT = 32, 512, 4096
"""Numbers of groups expanded at once, at first and at most; the first groups lower the time limit, which saves pricing
later groups. Where parts of a space, or a plain search, gave a limit, few of a group's layouts are below it, and more
groups are expanded at once."""
_PREPARED = 512
"""Maximum number of groups whose micro-batches are priced at the beginning of a pass, as many as most passes expand."""
_EXACT_ROWS = 3_000
"""Number of layouts that the closed equations price in the time of one exact price."""
_MOST_ROWS = 3_000_000
"""Maximum number of rows that a pass prices (in about 30 s): three times the number for the largest published runs."""
_HURRIED = 500
"""Maximum number of queued layouts that are tried when the user has stopped a search that has found none."""


class Search(Prices):
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
        proven: bool = True,
        gap: float = 0.0,
    ) -> None:
        """Prepare a search of the groups and policies in two masks (None: all) that shares the prices of ``shared``.

        Layouts with a score above ``limit_s`` are not looked for. Without ``proven``, the score leaves out the errors
        of mechanisms. The result's score may be above the least by the share ``gap``.
        """
        super().__init__(problem, space, groups, policies, None if shared is None else shared.seen)
        self.proven = proven
        self.weights: ScoreWeights = (
            shared.weights
            if shared is not None and shared.proven == proven
            else ScoreWeights.of(problem, space.groups, space.size, space.policies, proven=proven)
        )
        """Shares of the step time that the score adds for groups and policies."""
        self._shared = shared
        self.result = SearchResult(None)
        self.exact: dict[Key, Priced] = {} if shared is None else shared.exact
        """Exact prices by group and policy; searches of one space may share them."""
        self._second: SecondBounds = SecondBounds() if shared is None else shared._second
        self._left_out = np.zeros(space.size, dtype=bool)
        """Mask of groups that are too large under every policy."""
        self._best_at: tuple[float, Key] | None = None
        """Score and key of the best layout so far."""
        self.bound_s: NDArray[np.float64] = np.zeros(0)
        """Lower bound of each group's step time in seconds."""
        self.least_bytes: NDArray[np.float64] = np.zeros(0)
        """Bytes of device memory that each group needs at least, or fewer."""
        self._parts: list[Leaves] = []
        self._limit_s = limit_s
        self._gap = gap
        self._is_part = False
        self._queue = Queue(problem, space, self._second)

    def run(self) -> SearchResult:
        """Return a result with the layout that has the least score among those that are predicted to fit.

        Raises :class:`~partool.planner.problem.Stopped` if the search was stopped before any layout was found.
        """
        if self._shared is not None:
            # The bounds of the shared search hold under all policies, and so under fewer.
            self.bound_s, self.least_bytes = self._shared.bounds_of(self.groups), self._shared.least_of(self.groups)
        elif not len(self.bound_s):
            self.bound()
        if len(self.groups) and len(self.policies):
            if self._limit_s == float("inf"):
                self._look_at_parts()
            self._pass()
        if self.problem.budget.stopped and not self.problem.budget.has_best:
            raise Stopped
        self.result.leaves = Leaves.join(self._parts)
        return self.result

    def bound(self) -> None:
        """Bound the least memory and the least time of every group, and count the groups that are too large.

        The time of a group that is too large is infinite, unless all groups are too large. Groups whose passes alone
        are above the limit of the score have only the bound of their passes, and none of memory.
        """
        if len(self.groups) and len(self.policies) and self._limit_s < float("inf"):
            self.bound_s, self.least_bytes = self.pass_bounds(self.groups), np.zeros(len(self.groups))
            factor = 1.0 + self.weights.group[self.groups] + self.weights.policy[self.policies].min()
            near = np.flatnonzero(self.bound_s * factor <= self._limit_s)
            groups = self.groups[near]
            self.least_bytes[near] = self.bounded_memory(groups) if len(near) else 0.0
            may_fit = self.least_bytes[near] <= self.problem.capacity_bytes * self.slack(groups)
            self._count_too_large(groups[~may_fit])
            self.bound_s[near[~may_fit]] = np.inf
            self.bound_s[near[may_fit]] = self.group_bounds(groups[may_fit])
        else:
            self.bound_all()

    def bound_all(self) -> None:
        """Bound all groups, whatever the limit of the score."""
        if len(self.groups) and len(self.policies):
            self.least_bytes = self.bounded_memory(self.groups)
            may_fit = self.least_bytes <= self.problem.capacity_bytes * self.slack(self.groups)
            self._count_too_large(self.groups[~may_fit])
            timed = may_fit if may_fit.any() else np.ones_like(may_fit)
            self.bound_s = np.full(len(self.groups), np.inf)
            self.bound_s[timed] = self.group_bounds(self.groups[timed])

    def bounds_of(self, groups: Any) -> Any:
        """Return the lower bounds of the step time of some groups of the space; this search has bounds of all groups.

        Raises ``ValueError`` where :meth:`bound` has not been called, or the search has not all groups.
        """
        if len(self.bound_s) != self.space.size:
            raise ValueError("only a search of all groups, whose bounds are known, can be shared")
        return self.bound_s[groups]

    def least_of(self, groups: Any) -> Any:
        """Return the least bytes of device memory of some groups of the space, or fewer."""
        return self.least_bytes[groups]

    def _count_too_large(self, groups: Any) -> None:
        self._left_out[groups] = True
        self.result.too_large = self.space.count(self._left_out, self.policies)

    def second_s(self, key: Key) -> float:
        """Return the second bound of a layout's step time; 0 if the search has not needed it."""
        return self._second.bound_s.get(key, 0.0)

    @property
    def evaluated(self) -> int:
        """Number of layouts whose bounds were computed, minus those that are counted as too large."""
        if not self.seen:
            return 0
        numbers = np.concatenate(self.seen)
        group, policy = np.divmod(numbers[firsts(numbers)], len(self.space.policies))
        return int((self.space.counted(group, policy) & ~self._left_out[group]).sum())

    def price(self, group: int, policy: int) -> Priced:
        """Return the exact price of one layout."""
        key = (int(group), int(policy))
        if key not in self.exact:
            self.problem.budget.rows += _EXACT_ROWS
            self.exact[key] = Priced(self.problem, layout_of(self.problem, self.space.rows(*key)))
        return self.exact[key]

    def fastest_that_fits(self, groups: Any, slack: float = SLACK) -> int | None:
        """Return the group with the least bound of time among those that fit under some policy; None if none fits.

        This search has bounds of all groups. ``slack`` is the share by which memory may be exceeded.
        """
        capacity = self.problem.capacity_bytes * (1.0 + slack)
        may_fit = groups[self.least_bytes[groups] <= capacity]
        order = may_fit[np.argsort(self.bound_s[may_fit], kind="stable")]
        start, count = 0, _AT_FIRST  # one of the first fits as a rule
        while start < len(order):
            near = order[start : start + count]
            fits = np.flatnonzero(self.least_memory(near)[0] <= capacity)
            if len(fits):
                return int(near[fits[0]])
            start, count = start + count, min(8 * count, PRICED_AT_ONCE)
        return None

    def _look_at_parts(self) -> None:
        """Search the parts of the space where a good layout is found soon; its score limits the search of all."""
        for places, few in stages(self.space, self.groups, self.policies):
            part = Search(
                self.problem, self.space, shared=self, limit_s=self._limit_s, proven=self.proven, gap=self._gap
            )
            part._is_part = True
            part.groups, part.policies = self.groups[places], self.policies[few]
            part.bound_s, part.least_bytes = self.bound_s[places], self.least_bytes[places]
            part._pass()
            self._parts += part._parts
            if part._best_at is not None and (self._best_at is None or part._best_at < self._best_at):
                self._best_at, self._limit_s, self.result.best = part._best_at, part._limit_s, part.result.best

    def _pass(self) -> None:
        """Expand groups and price queued layouts, both by their bounds, until no bound is below the best score."""
        may_fit = self.least_bytes <= self.problem.capacity_bytes * self.slack(self.groups)
        bound = self.bound_s * (1.0 + self.weights.group[self.groups] + self.weights.policy[self.policies].min())
        order = np.flatnonzero(may_fit)[np.argsort(bound[may_fit], kind="stable")]
        self.prepare(self.groups[order[bound[order] <= self._limit_s][:_PREPARED]])
        limited = self._limit_s < float("inf") and not self._is_part
        position, batch = 0, _WITH_LIMIT if limited else _AT_FIRST
        start = self.problem.budget.rows
        while not self._reached_limit(start):
            following = bound[order[position]] if position < len(order) else float("inf")
            if self._queue.least_s <= following:
                if self._queue.least_s > self._limit_s or not self._queue:
                    break
                key = self._queue.pop(self._limit_s)
                if key is not None:
                    self._settle(key)
            elif following <= self._limit_s:
                near = order[position : position + batch]
                self._expand(self.groups[near[bound[near] <= self._limit_s]])
                position += batch
                batch = _WITH_LIMIT if limited else min(2 * batch, _MOST_AT_ONCE)
            else:
                break
        if self.problem.budget.stopped:
            self._hurry()

    def _hurry(self) -> None:
        """Take the first layout of the queue that fits, if none has been taken before the user stopped the search."""
        for _ in range(_HURRIED):
            if self.result.best is not None or not self._queue:
                break
            key = self._queue.pop(float("inf"))
            if key is not None:
                self._settle(key)

    def _reached_limit(self, start_rows: int) -> bool:
        """Return True if a pass that began after ``start`` rows has reached its limit.

        The limit is twice as high while no layout has been found, as the plan would otherwise report that nothing fits.
        """
        budget = self.problem.budget
        limit_rows = start_rows + (_MOST_ROWS if self.result.best is not None else 2 * _MOST_ROWS)
        if budget.rows <= min(limit_rows, budget.limit_rows):
            return False
        self.result.complete, budget.reached_limit = False, True
        return True

    def score_s(self, priced: Priced) -> float:
        """Return the seconds by which this search orders layouts."""
        return priced.score_s if self.proven else priced.paper_s

    def _settle(self, key: Key) -> None:
        """Take a layout as the best so far if it fits and has the least score; of equal scores the first key counts."""
        priced = self.price(*key)
        if not priced.fits:
            return
        at = self.score_s(priced), key
        if at[0] > self._limit_s or (self._best_at is not None and at >= self._best_at):
            return
        self._best_at, self._limit_s, self.result.best = at, at[0] * (1.0 - self._gap), priced
        self.problem.budget.has_best, self.problem.budget.best_s = True, priced.step_time_s

    def _expand(self, groups: Any) -> None:
        """Price the layouts of ``groups`` that may still have the least score, and queue those that may fit."""
        factor = 1.0 + self.weights.group[groups][:, None] + self.weights.policy[self.policies][None, :]
        least = self.policy_bounds(groups) * factor
        open_ = (least <= self._limit_s) & self.space.allowed(groups[:, None], self.policies[None, :])
        which, column = np.nonzero(open_)
        leaves, unfit = self._fitting(groups[which], self.policies[column], least[which, column])
        self._parts.append(leaves)
        fill = fill_share(leaves.memory_bytes / self.slack(leaves.group), unfit, self.problem.devices.memory_bytes)
        weight = 1.0 + self.weights.group[leaves.group] + self.weights.policy[leaves.policy]
        scores = leaves.bound_s * (weight + fill)
        queued = scores <= self._limit_s
        queued &= ~dominated(self.problem, self.space, leaves, queued)
        self.problem.budget.has_fitting |= bool(queued.any())
        self._queue.push(scores[queued], weight[queued], leaves.group[queued], leaves.policy[queued])

    def _fitting(self, group: Any, policy: Any, least_s: Any) -> tuple[Leaves, Any]:
        """Return the layouts that may fit, and the least probability that each does not; keep the nearly fitting."""
        total, fit_probability, host, unfit = self.memory(group, policy, host_too=True)
        limit = self.problem.capacity_bytes * self.slack(group)
        fits = (total <= limit) & (host <= host_limit(self.problem))
        near = ~fits & (total <= CROWDED * limit)
        self.result.crowded.append((group[near], policy[near], least_s[near]))
        group, policy = group[fits], policy[fits]
        bound_s = self.bounds(group, policy)
        return Leaves(group, policy, bound_s, total[fits], fit_probability[fits], host[fits]), unfit[fits]

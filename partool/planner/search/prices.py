"""Prices of many layouts of a space at once, by closed equations: bounds of time, memory, and whether layouts fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.training.bound import Open
from partool.cost.training.offload import FAST_LINK
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.planner.search.price import (
    SLACK,
    bounds_s,
    host_limit,
    least_room,
    pass_bounds_s,
    prepare,
    room,
    room_below,
)
from partool.planner.search.space import Space

_MOST_SLACK = 0.5
"""Upper limit of the relative error that is added to ``SLACK`` for several pipeline stages and a large head."""
PRICED_AT_ONCE = 8192
"""Number of layouts whose time is priced at once."""
_MORE = 65536
"""Number of layouts whose memory is priced at once; more repeat each other more often."""
_ON_DEVICE: dict[str, Any] = {"gpu_fraction": 1.0, "offload_parameters": 0, "offload_activations": 0}
"""Columns of layouts that offload nothing."""


def firsts(codes: Any) -> Any:
    """Return the index of the first occurrence of each distinct value of ``codes``; the result is sorted by value.

    ``numpy.unique`` is not used, as it would import masked arrays.
    """
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    return order[np.concatenate([np.ones(min(len(codes), 1), dtype=bool), ordered[1:] != ordered[:-1]])]


class Prices:
    """Prices of some of the groups under some of the policies of a space."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        groups: Any = None,
        policies: Any = None,
        seen: list[NDArray[np.int64]] | None = None,
    ) -> None:
        """Take the groups and policies in two masks (None: all); ``seen`` is a list to share with other prices."""
        self.problem = problem
        self.space = space
        self.groups = np.arange(space.size) if groups is None else np.flatnonzero(groups)
        self.policies = np.arange(len(space.policies)) if policies is None else np.flatnonzero(policies)
        self.seen: list[NDArray[np.int64]] = [] if seen is None else seen
        """Pairs of group and policy whose bound has been computed, as ``group * policies + policy``; a pair may come
        several times. A mask of all pairs would have a hundred times as many entries."""

    def least_memory(self, groups: Any, most_bytes: Any = float("inf")) -> tuple[Any, Any]:
        """Return the least bytes of device memory that each group needs, and the probability that these bytes fit.

        Groups that need more than ``most_bytes`` may get fewer bytes, which are still more than these.
        """
        total, fit_probability, *_ = self.memory(groups, self.sparing(groups), most_bytes=most_bytes)
        return total, fit_probability

    def bounded_memory(self, groups: Any) -> NDArray[np.float64]:
        """Return bytes of device memory that each group exceeds under every policy."""
        self.problem.budget.rows += len(groups)
        most, sparing, parts = self.problem.capacity_bytes * self.slack(groups), self.sparing(groups), []
        for start in range(0, len(groups), _MORE):
            part = slice(start, start + _MORE)
            parts.append(least_room(self.problem, self.space.rows(groups[part], sparing[part]), most[part]))
        return np.concatenate(parts)

    def sparing(self, groups: Any) -> Any:
        """Return, for each group, the policy that needs least device memory."""
        table, zero3 = self.space.policies, np.asarray(self.space.groups.zero)[groups] == 3
        stays = self.policies[table.parameters[self.policies] == 0]
        policy = np.full(len(groups), stays[-1] if len(stays) else self.policies[-1])
        if (table.parameters[self.policies] == 1).any():
            policy[zero3] = self.policies[-1]
        return policy

    def least_times(self) -> Any:
        """Return a lower bound of each group's step time in seconds, whether the group fits or not."""
        return self.group_bounds(self.groups)

    def could_fit(self) -> bool:
        """Return True if some layout fits device and host memory under one of the policies that save most memory."""
        for policy in self.extremes():
            groups = self.groups[self.space.goes(self.groups, np.full(len(self.groups), policy))]
            total, _, host, _ = self.memory(groups, np.full(len(groups), policy))
            fits = (total <= self.problem.capacity_bytes * self.slack(groups)) & (host <= host_limit(self.problem))
            if fits.any():
                return True
        return False

    def smallest(self) -> tuple[int, int]:
        """Return the indices of group and policy of the layout that needs least device memory.

        If a layout exceeds host memory, the host memory that it needs is added to its device memory.
        """
        candidates = []
        for policy in self.extremes():
            groups = self.groups[self.space.goes(self.groups, np.full(len(self.groups), policy))]
            total, _, host, _ = self.memory(groups, np.full(len(groups), policy), exact=True)
            if len(groups):
                worst = np.where(host <= host_limit(self.problem), total, total + host)
                candidates.append((float(worst.min()), int(groups[np.argmin(worst)]), policy))
        return min(candidates)[1:]

    def extremes(self) -> list[int]:
        """Return the indices of policies that save most device memory, sorted by their use of host memory."""
        table = self.space.policies
        moved = 1.0 - table.gpu_fraction + table.parameters + table.activations
        here = self.policies[moved[self.policies] == moved[self.policies].min()]
        stays = self.policies[table.parameters[self.policies] == 0]
        parts = [stays[table.gpu_fraction[stays] == part] for part in sorted(set(table.gpu_fraction[stays].tolist()))]
        return sorted({int(here[-1]), int(self.policies[-1]), *(int(part[-1]) for part in parts)})

    def columns(self, group: Any, policy: Any, least_probability: float = 0.0) -> tuple[Any, Any]:
        """Return the layouts' lower bounds of time and device memory.

        Both are infinite where device or host memory is exceeded, or the probability of fitting is below
        ``least_probability``.
        """
        total = self.fitting_bytes(group, policy, least_probability=least_probability)
        fits, bound = np.isfinite(total), np.full(len(group), np.inf)
        bound[fits] = self.bounds(group[fits], policy[fits])
        return bound, total

    def fitting_bytes(
        self, group: Any, policy: Any, most_bytes: Any = float("inf"), *, least_probability: float = 0.0
    ) -> NDArray[np.float64]:
        """Return the layouts' device memory in bytes.

        It is infinite where device or host memory is exceeded, the layout needs more than ``most_bytes`` of the device,
        or the probability of fitting is below ``least_probability``.
        """
        total, probability, host, _ = self.memory(group, policy, host_too=True, most_bytes=most_bytes)
        fits = (
            (total <= np.minimum(self.problem.capacity_bytes, most_bytes))
            & (host <= host_limit(self.problem))
            & (probability >= least_probability)
        )
        return np.where(fits, total, np.inf)

    def slack(self, groups: Any) -> Any:
        """Return the factor by which the closed equations may exceed the exact memory of a group's layouts.

        The closed equations split layers evenly; if the head costs as much as several layers, the last stage gets fewer
        layers. If the spec pins the layers of stages or gives its own schedule, the factor is ``1 + _MOST_SLACK``.
        """
        model = self.problem.model
        head = model.vocab * model.hidden / max(self.problem.layer_elements, 1)
        pp = np.asarray(self.space.groups.pp)[groups]
        if self.problem.stage_layers is not None or self.problem.lists is not None:
            return np.where(pp > 1, 1.0 + _MOST_SLACK, 1.0 + SLACK)
        return 1.0 + SLACK + np.where(pp > 1, np.minimum(head * pp / model.blocks, _MOST_SLACK), 0.0)

    def group_bounds(self, groups: Any) -> Any:
        """Return a lower bound of each group's step time under any policy: recompute least, and offload for nothing."""
        every = [self._bare(groups, np.full(len(groups), policy), recompute=True) for policy in self._bases]
        return np.min(every, axis=0)

    def pass_bounds(self, groups: Any) -> NDArray[np.float64]:
        """Return a lower bound of each group's step time under any policy in a tenth of the time: passes alone."""
        self.problem.budget.rows += len(groups) // 10
        least = np.full(len(groups), np.inf)
        for start in range(0, len(groups), _MORE):
            part = slice(start, start + _MORE)
            for policy in self._bases:
                rows = self.space.rows(groups[part], np.full(len(groups[part]), policy)).with_columns(**_ON_DEVICE)
                least[part] = np.minimum(least[part], pass_bounds_s(self.problem, rows))
        return least

    @property
    def _bases(self) -> Any:
        """The policies of which one takes no longer than any other of the search."""
        # A tiled network recomputes in any case, and may take longer than a whole one.
        return self.policies[firsts(self._recompute)] if self.problem.mlp_tile else self.policies[:1]

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
        fast |= not cost_job(self.problem).stack.staged_offload
        least = float(self.space.policies.gpu_fraction[self.policies].min()) if fast else 1.0
        return self.bounds(groups, policy, Open(least, recompute))

    def policy_bounds(self, groups: Any) -> Any:
        """Return a matrix of lower bounds of the step time, with a row per group and a column per policy.

        A policy's bound holds for every offload.
        """
        recompute = self._recompute
        one = firsts(recompute)
        many = np.repeat(groups, len(one))
        times = self._bare(many, np.tile(self.policies[one], len(groups))).reshape(len(groups), len(one))
        return times[:, np.searchsorted(recompute[one], recompute)]

    def prepare(self, groups: Any) -> None:
        """Price the micro-batches of groups that will be expanded at once, which takes less time than one by one."""
        one = self.policies[firsts(self._recompute)]
        group, policy = np.repeat(groups, len(one)), np.tile(one, len(groups))
        allowed = self.space.allowed(group, policy)
        prepare(self.problem, self.space.rows(group[allowed], policy[allowed]).with_columns(**_ON_DEVICE))

    def bounds(self, group: Any, policy: Any, open_choices: Open | None = None) -> Any:
        """Return lower bounds of the step time; ``open_choices`` are those that the bounds leave open."""
        self.seen.append(group * len(self.space.policies) + policy)
        self.problem.budget.rows += len(group)
        for i in range(0, len(group) if len(group) > PRICED_AT_ONCE else 0, _MORE):
            rows = self.space.rows(group[i : i + _MORE], policy[i : i + _MORE])
            prepare(self.problem, rows if open_choices is None else rows.with_columns(**_ON_DEVICE))
        parts = []
        for i in range(0, len(group), PRICED_AT_ONCE):
            rows = self.space.rows(group[i : i + PRICED_AT_ONCE], policy[i : i + PRICED_AT_ONCE])
            rows = rows if open_choices is None else rows.with_columns(**_ON_DEVICE)
            parts.append(bounds_s(self.problem, rows, open_choices))
        return np.concatenate(parts) if parts else np.zeros(0)

    def memory(
        self,
        group: Any,
        policy: Any,
        *,
        exact: bool = False,
        host_too: bool = False,
        most_bytes: Any = float("inf"),
    ) -> tuple[Any, ...]:
        """Return bytes of device memory, probability of fitting, bytes of host memory, least probability against it.

        Unless all are to be ``exact``, layouts that are too large by far, or need more than ``most_bytes``, may get
        fewer bytes, by which they still are too large. With ``host_too``, layouts that are too large for the host may
        get infinite bytes of it.
        """
        self.problem.budget.rows += len(group)
        most = self.problem.capacity_bytes * np.broadcast_to(self.slack(group), len(group))
        most = np.minimum(most, most_bytes)
        most_host = host_limit(self.problem) if host_too else float("inf")
        parts = []
        for i in range(0, len(group), _MORE):
            rows = self.space.rows(group[i : i + _MORE], policy[i : i + _MORE])
            parts.append(
                room(self.problem, rows) if exact else room_below(self.problem, rows, most[i : i + _MORE], most_host)
            )
        if not parts:
            return (np.zeros(0),) * 4
        return tuple(
            np.concatenate([np.broadcast_to(getattr(part, name), np.shape(part.total_bytes)) for part in parts])
            for name in ("total_bytes", "probability", "host_bytes", "unfit")
        )

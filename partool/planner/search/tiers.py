"""Choice among tiers of evidence: textbook layouts first, others only where they are needed or clearly faster.

The tiers are those of :mod:`partool.strategies.tiers`. A layout of a higher tier is taken if it is sure to fit and no
layout of a lower tier is, or if it is faster by more than twice the error of such predicted ratios
(:func:`partool.cost.evidence.paired_error`). Mechanisms that the spec asks for do not count. ``limits.prefer: fastest``
turns the rule off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import SCHEDULES, SEQUENCE_METHODS, Layouts
from partool.cost.evidence import paired_error
from partool.planner.evidence import ABOVE_TIER_0, margin, schedule_tier, sequence_tier
from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Leaves, Search, SearchResult
from partool.planner.search.glance import glance
from partool.planner.search.policies import Policies
from partool.planner.search.price import Priced
from partool.planner.search.space import Space
from partool.strategies.tiers import OFFLOAD_OPTIMIZER, OFFLOAD_REST, TENSOR_2D, TIERS
from partool.work.training import MASTER_BYTES

SMALL_STATE_BYTES = 18.0
"""Bytes of training state per parameter in mixed precision: weights and gradients in two types, two moments
(Megatron-LM's ``theoretical_memory_usage.py``)."""
MOST_MARGIN = 1.0
"""The textbook layout is not looked for among layouts that take more than twice the time of the fastest."""
_SMALL = 0.5
"""Share of a node's device memory that the state of a *small* model takes at most."""


@dataclass(frozen=True)
class Tiered:
    """The best layout of each tier, and the one that is taken."""

    taken: SearchResult
    """Result with the layout that is taken, and with the leaves of all tiers."""
    by_tier: tuple[Priced | None, ...]
    """A good layout of each tier, by number; None if the tier has no layout that is sure to fit, or no layout at all.
    Of tier 0 it is the best; of a higher tier that could not win it is the best of the few that were looked at."""
    textbook: Priced | None
    """Best layout of the textbook form for this size."""

    def with_refined(self, before: Priced, after: Priced) -> Tiered:
        """Return the same with one layout refined."""
        textbook = after if self.textbook is before else self.textbook
        return replace(self, by_tier=tuple(after if one is before else one for one in self.by_tier), textbook=textbook)


def group_tiers(problem: Problem, groups: Layouts, size: int) -> NDArray[np.int64]:
    """Return each group's tier; mechanisms that the problem grants count as tier 0."""
    granted = problem.granted
    schedule = np.array([schedule_tier(name, granted) for name in SCHEDULES])
    method = np.array([sequence_tier(name, granted) for name in SEQUENCE_METHODS])
    inner = 0 if "tensor_2d" in granted else TENSOR_2D
    parts = (
        np.where(np.asarray(groups.pp) > 1, schedule[np.asarray(groups.schedule)], 0),
        np.where(np.asarray(groups.cp) > 1, method[np.asarray(groups.sequence_method)], 0),
        np.where(np.asarray(groups.tensor_inner) > 1, inner, 0),
    )
    return _highest(parts, size)


def policy_tiers(problem: Problem, policies: Policies) -> NDArray[np.int64]:
    """Return each policy's tier; mechanisms that the problem grants count as tier 0."""
    granted = problem.granted
    optimizer = OFFLOAD_REST if problem.offload.optimizer == "nvme" else OFFLOAD_OPTIMIZER
    parts = (
        np.where(policies.gpu_fraction < 1.0, 0 if "offload_optimizer" in granted else optimizer, 0),
        np.where(policies.parameters > 0, 0 if "offload_parameters" in granted else OFFLOAD_REST, 0),
        np.where(policies.activations > 0, 0 if "offload_activations" in granted else OFFLOAD_REST, 0),
    )
    return _highest(parts, len(policies))


def _highest(parts: tuple[Any, ...], size: int) -> NDArray[np.int64]:
    tiers: NDArray[np.int64] = np.maximum.reduce([np.broadcast_to(part, size) for part in parts]).astype(np.int64)
    return tiers


def least_margin() -> float:
    """Return by how much a layout of a higher tier must be faster at least, whatever else tells it apart."""
    return 2.0 * min(paired_error([name]) for name in ABOVE_TIER_0)


def is_small(problem: Problem) -> bool:
    """Return True if the model's whole training state takes at most half of one node's device memory.

    Published runs train such models with data parallelism and ZeRO alone (MosaicML's and torchtitan's tables of 7B and
    8B), and larger models with tensor parallelism in a node times pipelines times data parallelism with ZeRO-1
    (Megatron-LM, arXiv 2104.04473, section 5.4.1; Llama 3, arXiv 2407.21783, section 3.3.2).
    """
    node_bytes = problem.devices.memory_bytes * problem.devices.per_node
    of_parameter = SMALL_STATE_BYTES if problem.job.backward else MASTER_BYTES[problem.spec.training.precision]
    return of_parameter * problem.parameters <= _SMALL * node_bytes


def textbook_groups(problem: Problem, groups: Layouts, size: int) -> NDArray[np.bool_]:
    """Return a mask of the groups that have the textbook form for this size of model (:func:`is_small`)."""
    long = "long_sequence" in problem.granted
    columns = (groups.tp, groups.pp, groups.cp, groups.zero, groups.tensor_inner)
    tp, pp, cp, zero, inner = (np.broadcast_to(np.asarray(column), size) for column in columns)
    # Experts may take the place of tensor parallelism (DeepSeek-V3, arXiv 2412.19437, section 3.2).
    large = (
        ((cp == 1) | long)
        & (inner == 1)
        & (zero <= 1)
        & ((tp > 1) | (problem.model.moe is not None))
        & (tp <= problem.domain)
    )
    mask: NDArray[np.bool_] = (tp == 1) & (pp == 1) & ((cp == 1) | long) if is_small(problem) else large
    return mask


def by_tier(problem: Problem, space: Space, search: Search, groups: Any = None, policies: Any = None) -> Tiered:
    """Search some of the groups and policies tier by tier; ``search`` shares its prices with these searches."""
    everyone = np.ones(space.size, bool) if groups is None else np.asarray(groups)
    every = np.ones(len(space.policies), bool) if policies is None else np.asarray(policies)
    if problem.spec.limits.prefer == "fastest":
        result = Search(problem, space, everyone, every, search).run()
        return Tiered(result, (), None)
    of_group, of_policy = group_tiers(problem, space.groups, space.size), policy_tiers(problem, space.policies)
    taken: Priced | None = None
    results: list[SearchResult] = []
    bests: list[Priced | None] = []
    textbook: Priced | None = None
    searched: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = None
    for tier in range(len(TIERS)):
        some, few = everyone & (of_group <= tier), every & (of_policy <= tier)
        new_policies = bool((few & (of_policy == tier)).any())
        new = bool((some & (of_group == tier)).any()) or new_policies
        if not (some.any() and few.any() and (new or tier == 0)):
            bests.append(None)
            continue
        lower = [one for one in bests if one is not None]
        # Lower tiers' layouts that may not fit set no limit: a layout that is sure to fit is taken instead of them.
        sure_to_fit = [one for one in lower if one.safe]
        limit_s = min((one.step_time_s for one in sure_to_fit), default=float("inf")) / (1.0 + least_margin())
        only_green = bool(sure_to_fit)
        near = some & (of_group == tier) if searched is not None and not new_policies else some
        one = Search(problem, space, near, few, search, limit_s=limit_s, searched=searched)
        result, searched = one.run(only_green=only_green), (some, few)
        results.append(result)
        best = result.best
        if best is None and lower:
            best = glance(Search(problem, space, some, few, search), search, of_group == tier, of_policy == tier)
        bests.append(best)
        if best is not None and all(_clearly_faster(best, other) for other in (sure_to_fit if best.safe else lower)):
            taken = best
        if tier == 0 and taken is not None:
            form = everyone & (of_group == 0) & textbook_groups(problem, space.groups, space.size)
            limit_s = (1.0 + MOST_MARGIN) * taken.step_time_s
            textbook = Search(problem, space, form, few, search, limit_s=limit_s).run(only_green=taken.safe).best
            if textbook is not None and not _clearly_faster(taken, textbook):
                taken = textbook
    return Tiered(_joined(results, taken, search), tuple(bests), textbook)


def _clearly_faster(one: Priced, other: Priced) -> bool:
    """Return True if ``one`` is faster than ``other`` by more than the error of such a predicted ratio."""
    if one is other:
        return False
    return one.step_time_s * (1.0 + margin(one.layout, other.layout)) < other.step_time_s


def _joined(results: list[SearchResult], taken: Priced | None, search: Search) -> SearchResult:
    return SearchResult(
        taken,
        Leaves.join([result.leaves for result in results]),
        search.result.too_large,
        all(result.complete for result in results),
    )

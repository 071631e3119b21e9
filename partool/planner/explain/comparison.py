"""Rows beside a plan: one faster on paper, data parallelism alone, fewer devices, the next best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from partool.cost.case import RECOMPUTE
from partool.cost.memory.fit import GREEN
from partool.plan.as_spec import as_yaml
from partool.plan.types import Alternative
from partool.planner.explain.candidates import kind
from partool.planner.explain.summary import summary, why_lost
from partool.planner.forms.runnable import runnable
from partool.planner.problem import Problem
from partool.planner.search.ordered import best_of_kinds
from partool.planner.search.price import TIE, Priced
from partool.planner.search.prices import firsts
from partool.planner.search.solve import Solution

_ROWS = 5
"""Number of rows, without the row that does not fit."""
_NEXT = 2
"""Number of rows without a role: the next best layouts of other kinds."""
_LOOKED_AT = 5
"""Number of kinds of layouts for which the best layout is priced exactly, to find runners-up."""
_NEAREST = 20_000
"""Number of layouts that are searched for different kinds: the layouts with the least time bounds."""

_MESHES = 16
"""Number of groups (mesh, micro-batch and so on) without pipeline that are searched per ZeRO stage for runners-up."""


def rows(
    solution: Solution, best: Priced, fewer: Sequence[tuple[Problem, Priced]] = ()
) -> list[tuple[str, Problem, Priced]]:
    """Return other layouts with their roles and problems: those with a role, the next best, one that does not fit.

    ``fewer`` are good layouts on fewer devices. Rows with a role are left out where they are the plan's own layout.
    """
    others: list[tuple[str, Problem, Priced]] = []
    for role, priced in _roles(solution, best):
        if priced is not best and all(priced is not other for _, _, other in others):
            others.append((role, solution.problem, priced))
    others += [(f"{problem.world_size} devices", problem, priced) for problem, priced in fewer[:1]]
    others += [("", solution.problem, one) for one in _next(solution, best, [one for *_, one in others])][
        : _ROWS - len(others)
    ]
    return [*others, *(("does not fit", solution.problem, one) for one in _too_large(solution, best))]


def alternatives(best: Priced, others: Sequence[tuple[str, Problem, Priced]]) -> tuple[Alternative, ...]:
    """Return the rows of a plan for other layouts, each given with its role and its problem."""
    return tuple(_alternative(role, problem, best, priced) for role, problem, priced in others)


def _roles(solution: Solution, best: Priced) -> Iterator[tuple[str, Priced]]:
    """Yield the layouts that have a role, with its name: on paper, data parallelism alone, without host memory."""
    if solution.better is not None:
        yield "cannot run yet", solution.better
    if solution.on_paper is not None:
        yield "faster on paper", solution.on_paper
    groups = solution.space.groups
    plain = (groups.tp == 1) & (groups.pp == 1) & (groups.cp == 1) & (groups.ep == 1)
    here = solution.space.policies
    stays = (here.gpu_fraction == 1.0) & (here.parameters == 0) & (here.activations == 0)
    if best.layout.offload.active:
        role, result = "without host memory", solution.without(None, stays)
    else:
        role, result = "ZeRO alone", solution.without(plain, stays) if best.risk else None
    if result is not None and result.best is not None:
        yield role, result.best


def _next(solution: Solution, best: Priced, rows: Sequence[Priced]) -> list[Priced]:
    """Return the next best layouts of other kinds that use no more mechanisms than the plan, best score first."""
    next_best = _unsure(solution, best)[:1]
    kinds = {kind(priced) for priced in (best, *rows, *next_best)}
    able = runnable(solution.problem, best.layout)
    _price_runners_up(solution)

    def other(priced: Priced) -> bool:
        return kind(priced) not in kinds and priced.fits and priced.risk <= best.risk

    def ready(priced: Priced) -> bool:
        return other(priced) and runnable(solution.problem, priced.layout)

    # A runnable plan is compared with other runnable plans first.
    for wanted in (ready, other) if able else (other,):
        for priced in islice(best_of_kinds(solution.search, kind, wanted), max(0, _NEXT - len(next_best))):
            kinds.add(kind(priced))
            next_best.append(priced)
    return sorted(next_best, key=lambda priced: (priced.score_s, summary(priced.layout)))


def _price_runners_up(solution: Solution) -> None:
    """Price the best layouts of several kinds."""
    if solution.able is not None and solution.able.best is not None:
        _price_kinds(solution, solution.able.leaves)
    _price_unstaged(solution)
    _price_kinds(solution, solution.overall.leaves)


def _price_unstaged(solution: Solution) -> None:
    """Price the fastest runnable layout without pipeline for each ZeRO stage and recomputation policy, at most five.

    Bounds of pipelines are loose, so the search prices many pipelines before a runner-up without pipeline.
    """
    search, space, groups = solution.search, solution.space, solution.space.groups
    index = np.flatnonzero(space.runnable & (groups.pp == 1))
    index = index[np.argsort(search.bound_s[index], kind="stable")]
    index = np.concatenate([index[np.asarray(groups.zero)[index] == zero][:_MESHES] for zero in range(4)])
    policies = np.flatnonzero(space.runnable_policies)
    group, policy = np.repeat(index, len(policies)), np.tile(policies, len(index))
    allowed = space.allowed(group, policy)
    group, policy = group[allowed], policy[allowed]
    bound, _ = search.columns(group, policy)
    order = np.argsort(bound, kind="stable")
    order = order[np.isfinite(bound[order])]
    code = len(RECOMPUTE) * np.asarray(groups.zero)[group[order]] + space.policies.recompute[policy[order]]
    for at in np.sort(firsts(code))[:_LOOKED_AT]:
        search.price(int(group[order[at]]), int(policy[order[at]]))


def _price_kinds(solution: Solution, leaves: Any) -> None:
    """Price the fastest layout of each of several kinds; kinds differ in parallelism, recomputation or offload."""
    table = solution.space.policies
    sure_to_fit = np.flatnonzero(leaves.probability >= GREEN)
    order = sure_to_fit[np.argsort(leaves.bound_s[sure_to_fit], kind="stable")][:_NEAREST]
    group, policy = leaves.group[order], leaves.policy[order]
    row = solution.space.groups.take(group)
    code = np.zeros(len(order), dtype=np.int64)
    for column in (
        row.tp > 1, row.pp > 1, row.cp > 1, row.ep > 1, row.zero,
        table.recompute[policy], table.gpu_fraction[policy] < 1, table.parameters[policy], table.activations[policy],
    ):  # fmt: skip
        code = len(RECOMPUTE) * code + column
    for index in np.sort(firsts(code))[:_LOOKED_AT]:
        solution.search.price(group[index], policy[index])


def _unsure(solution: Solution, best: Priced) -> list[Priced]:
    """Return layouts that are faster than ``best`` and predicted to fit, but not sure to fit."""
    if not best.safe:
        return []
    leaves = solution.overall.leaves
    faster = np.flatnonzero((leaves.bound_s < best.time.step_time_s * (1.0 - TIE)) & (leaves.probability < GREEN))
    order = faster[np.argsort(leaves.bound_s[faster], kind="stable")][:3]
    priced = [solution.search.price(leaves.group[index], leaves.policy[index]) for index in order]
    return [one for one in priced if one.fits and not one.safe and one.time.step_time_s < best.time.step_time_s]


def _too_large(solution: Solution, best: Priced) -> list[Priced]:
    """Return the layout that is fastest without memory limits; nothing if it fits or is not faster than ``best``."""
    fastest = solution.fastest
    slower = fastest is None or fastest.time.step_time_s > best.time.step_time_s * (1.0 - TIE)
    return [] if fastest is None or fastest.fits or slower else [fastest]


def _alternative(role: str, problem: Problem, best: Priced, other: Priced) -> Alternative:
    return Alternative(
        role=role,
        devices=problem.world_size,
        summary=summary(other.layout),
        step_time_s=other.time.step_time_s,
        score_s=other.score_s,
        memory_bytes=other.memory.total_bytes,
        runnable=runnable(problem, other.layout),
        why_not=why_lost(best, other),
        change=as_yaml(other.layout, problem.spec.parallel),
    )

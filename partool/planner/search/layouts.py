"""Conversion of a row of the search space to a :class:`Layout`, with the layers of each stage and their policies."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import Any, cast

import numpy as np

from partool.cost.case import RECOMPUTE, SCHEDULES, Layouts
from partool.cost.codec import LayoutLists, decode
from partool.cost.kinds import Kind
from partool.cost.training.micro import Micro, micro
from partool.layout.stages import balance
from partool.plan.layout import Layout
from partool.planner.cost_job import cost_job
from partool.planner.forms import gathers
from partool.planner.kernels.fused import fused
from partool.planner.problem import Problem
from partool.planner.search import offload
from partool.schedule import rank_of
from partool.spec.parallel import Compile, Recompute
from partool.strategies.schedules import SCHEDULES as KNOWN
from partool.work.training import TrainingWork

_GRAINS = 20
Bounds = tuple[tuple[int, int], ...]
"""Index of each stage's first layer, and index of the layer after the stage's last layer."""


def layout_of(problem: Problem, row: Layouts) -> Layout:
    """Return the layout of a single row, in which each column holds one number."""
    bounds: Bounds = ((0, problem.model.blocks),)
    if int(row.pp) > 1:
        wide = row.with_columns(**{name: np.atleast_1d(getattr(row, name)) for name in ("recompute", "pp")})
        bounds = splits(problem, wide, variant_costs(problem, wide))[0]
    compile: Compile = "block" if row.compiled else "none"
    rest = LayoutLists(
        recompute=recompute_of(problem, row, float(row.recompute_share), bounds),
        layers=tuple(stop - start for start, stop in bounds),
        gathers=gathers.resolved(problem, row),
        offload=offload.resolved(problem, row),
        patterns=problem.spec.parallel.tensor.patterns,
        expert_rank_capacity=problem.spec.parallel.rank_capacity,
        schedule_text=problem.lists_text if SCHEDULES[int(row.schedule)] == "file" else "",
        fused=fused(problem, compile, inner=int(row.tensor_inner)),
    )
    return decode(row, rest)


def recompute_of(problem: Problem, row: Layouts, share: float, bounds: Bounds) -> tuple[Recompute, ...]:
    """Return one policy per layer: the spec's list, or the row's policy and ``none`` if the spec has no list.

    The first layers of each pipeline rank have the row's policy: ``share`` of the rank's layers, rounded up. A rank's
    first stages hold activations longest. All other layers have ``none``.
    """
    pinned = problem.spec.parallel.recompute
    if isinstance(pinned, list):
        return tuple(pinned)
    policy = cast("Recompute", RECOMPUTE[int(row.recompute)])
    return _spread(policy, share, bounds, _ranks_of_stages(problem, row, len(bounds)))


def _ranks_of_stages(problem: Problem, row: Layouts, stages: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage."""
    name, pp = SCHEDULES[int(row.schedule)], int(row.pp)
    if pp == 1 or name not in KNOWN:
        return problem.lists.placement if pp > 1 and problem.lists is not None else (0,) * stages
    return tuple(rank_of(name, stage, pp) for stage in range(stages))


@lru_cache(maxsize=4096)
def _spread(policy: Recompute, share: float, bounds: Bounds, ranks: tuple[int, ...]) -> tuple[Recompute, ...]:
    sizes = [stop - start for start, stop in bounds]
    layers_of_rank = [
        sum(size for size, at in zip(sizes, ranks, strict=True) if at == rank) for rank in range(max(ranks) + 1)
    ]
    still_to_apply = [ceil(share * layers - 1e-9) for layers in layers_of_rank]
    policies: list[Recompute] = []
    for size, rank in zip(sizes, ranks, strict=True):
        some = min(size, still_to_apply[rank])
        still_to_apply[rank] -= some
        policies += [policy] * some + ["none"] * (size - some)
    return tuple(policies)


def variants(problem: Problem, rows: Layouts) -> list[Any]:
    """Return a column for each policy that layers have: the spec's policies, or each row's policy and ``none``."""
    pinned = problem.spec.parallel.recompute
    if isinstance(pinned, list):
        return [0 * rows.recompute + RECOMPUTE.index(policy) for policy in dict.fromkeys(pinned)]
    return [rows.recompute, 0 * rows.recompute]


def variant_costs(problem: Problem, rows: Layouts) -> list[Micro]:
    """Return, for each policy of :func:`variants`, the costs of a micro-batch if all layers follow the policy."""
    job = job_of_rows(problem, rows)
    return [micro(job, rows.with_columns(recompute=policy, recompute_share=1.0)) for policy in variants(problem, rows)]


def job_of_rows(problem: Problem, rows: Layouts) -> TrainingWork:
    """Return the input of the cost functions for rows that are either all compiled or all uncompiled."""
    return cost_job(problem, "block" if np.all(rows.compiled) else "none")


def splits(problem: Problem, rows: Layouts, costs: list[Micro]) -> list[Bounds]:
    """Return the bounds of each row's stages: bounds from the spec, or bounds that minimize the slowest stage's time.

    Times of layers are rounded to 1/20 of the slowest layer's time: smaller differences should not move layers, and
    rows with equal rounded times are split only once.
    """
    count = len(np.asarray(rows.recompute))
    if problem.stage_layers is not None:
        ends = list(accumulate(problem.stage_layers))
        return [tuple(zip([0, *ends[:-1]], ends, strict=True))] * count
    if problem.engine.uniform:
        return [_even(problem.model.blocks, int(stages)) for stages in np.broadcast_to(rows.pp * rows.chunks, count)]
    order = tuple(costs[0].layers)
    pinned = problem.spec.parallel.recompute
    weights = [rows.recompute_share, 1.0 - rows.recompute_share]
    if isinstance(pinned, list):
        weights = [pinned.count(policy) / len(pinned) for policy in dict.fromkeys(pinned)]
    times = {
        kind: sum(weight * cost.layers[kind].both_s for weight, cost in zip(weights, costs, strict=True))
        for kind in order
    }
    columns = [np.broadcast_to(column, count) for column in (*times.values(), *(
        unit.both_s for unit in (costs[0].first, costs[0].last)
    ))]  # fmt: skip
    slowest = np.max(columns[: len(order)], axis=0)
    rounded = (np.round(_GRAINS * np.stack(columns) / slowest) / _GRAINS).T.tolist()
    stages = np.broadcast_to(rows.pp * rows.chunks if problem.lists is None else problem.lists.stages, count)
    cases = [(tuple(values), number) for values, number in zip(rounded, stages.tolist(), strict=True)]
    of_case = {case: _split(problem.layer_kinds, order, *case) for case in dict.fromkeys(cases)}
    return [of_case[case] for case in cases]


def _even(layers: int, stages: int) -> Bounds:
    return tuple((layers * stage // stages, layers * (stage + 1) // stages) for stage in range(stages))


@lru_cache(maxsize=4096)
def _split(layers: tuple[Kind, ...], order: tuple[Kind, ...], values: tuple[float, ...], stages: int) -> Bounds:
    times, (first, last) = dict(zip(order, values[:-2], strict=True)), values[-2:]
    return balance([times[kind] for kind in layers], stages, first, last, grain=1.0 / _GRAINS)

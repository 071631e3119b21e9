"""Second bounds of pipelined layouts, from their own stages, for many layouts at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import RECOMPUTE, SCHEDULES, Layouts
from partool.cost.kinds import Kind
from partool.cost.training.bound import bound_s
from partool.cost.training.micro import Micro
from partool.cost.training.passes import recorded
from partool.cost.training.predict import DATA_S
from partool.cost.training.slowest import RankWork, slowest
from partool.cost.training.step import step
from partool.cost.training.sync import PassSeconds, RankParameters, pipeline_wait
from partool.planner.problem import Problem
from partool.planner.search.layouts import Bounds, job_of_rows, recompute_of, splits, variant_costs
from partool.planner.search.span import StagePasses, least_span_s, listed
from partool.planner.search.stage_memory import stage_memory
from partool.schedule import rank_of
from partool.strategies.schedules import SCHEDULES as KNOWN


class Refined(NamedTuple):
    """Second bounds of rows."""

    bound_s: Any
    """Lower bound of each row's step time."""
    fits: Any
    """Mask of rows; False where the memory of a row below the time limit exceeds what layouts may use."""
    total_bytes: Any
    """Bytes of device memory of each row below the time limit, or fewer; 0 of other rows."""
    unfit: Any
    """Probability that these bytes do not fit, or less."""


def refined(problem: Problem, rows: Layouts, limit_s: float = float("inf")) -> Refined:
    """Return a lower bound of each row's step time; of rows below ``limit_s`` also their memory.

    All rows have compiled blocks, or none has, and all have the same schedule, number of chunks, number of pipeline
    ranks (more than one), limit of micro-batches in flight, and number of
    :func:`partool.planner.search.span.listed` micro-batches. Stages, and everything outside of
    the micro-batches, are those of the exact prediction; only the waits of the schedule are bounded.
    """
    job = job_of_rows(problem, rows)
    first = rows.take(0)
    pp, chunks, schedule = int(first.pp), int(first.chunks), SCHEDULES[int(first.schedule)]
    if schedule == "file" or KNOWN[schedule].moves == "weights":
        closed_bound_s = np.asarray(bound_s(job, rows))
        none = np.zeros(closed_bound_s.shape)
        return Refined(closed_bound_s, none == 0.0, none, none)
    costs, (count,) = variant_costs(problem, rows), rows.shape
    counts = _counts_of_rows(problem, rows, splits(problem, rows, costs))
    at = np.array([rank_of(schedule, stage, pp) for stage in range(pp * chunks)])
    place = (at == np.arange(pp)[:, None]).astype(float)
    forward, backward, weight = (_of_stages(costs, counts, name) for name in ("forward_s", "backward_s", "weight_s"))
    stages = StagePasses(forward, backward, weight, place)
    exact = rows.with_columns(recompute_share=_share(problem, rows, counts))
    base = step(job, recorded(job, exact))
    m = np.broadcast_to(rows.accumulation, (count,))
    sizes = schedule, pp, chunks, int(first.in_flight), listed(schedule, pp, int(m[0]))
    busy = m * np.max(stages.of_ranks(forward + backward), axis=0)
    send = np.broadcast_to(base.send_s, (count,))
    span = np.maximum(busy, least_span_s(sizes, m, stages, send))
    dense, expert, summed = (stages.of_ranks(_of_stages(costs, counts, name)) for name in ("dense", "expert", "summed"))
    units = counts.sum(axis=(2, 3))
    units[:, 0] += 1
    units[:, -1] += 1
    passes = PassSeconds(stages.of_ranks(forward), stages.of_ranks(backward))
    rank_parameters = RankParameters(dense, expert, stages.of_ranks(units))
    slowest_rank = slowest(job, exact, base, RankWork(rank_parameters, passes, summed))
    waits = pipeline_wait(job, rows) * busy
    bound = job.time_scalar * (DATA_S + span + waits + slowest_rank.total_s + job.stack.overhead_s)
    near, fits = np.flatnonzero(bound <= limit_s), np.ones(count, dtype=bool)
    total_bytes, unfit = np.zeros(count), np.zeros(count)
    # Which policies a list by layer gives to a stage's layers is known only of an exact layout.
    if len(near) and not isinstance(problem.spec.parallel.recompute, list):
        fits[near], total_bytes[near], unfit[near] = stage_memory(problem, exact.take(near), counts[near], place)
    return Refined(bound, fits, total_bytes, unfit)


def _share(problem: Problem, rows: Layouts, counts: Any) -> Any:
    """Return the share of layers that recompute; 1 where none does, as in exact layouts."""
    shares = counts[:, :, 0].sum(axis=(1, 2)) / problem.model.blocks
    return np.where(np.asarray(rows.recompute) == 0, 1.0, shares)


def _counts_of_rows(problem: Problem, rows: Layouts, splits_of_rows: list[Bounds]) -> Any:
    """Return an array [rows, stages, variants, kinds] of numbers of layers; a variant is a policy that layers have."""
    first, count = rows.take(0), len(splits_of_rows)
    policies, shares = (np.broadcast_to(column, count).tolist() for column in (rows.recompute, rows.recompute_share))
    cases = list(zip(policies, shares, splits_of_rows, strict=True))
    # Few of the rows differ in these.
    of_case = {
        case: _counts(problem, first.with_columns(recompute=case[0]), *case[1:]) for case in dict.fromkeys(cases)
    }
    return np.stack([of_case[case] for case in cases])


def _counts(problem: Problem, row: Layouts, share: float, bounds: Bounds) -> Any:
    """Return an array [stages, variants, kinds] of numbers of layers for one row."""
    pinned = problem.spec.parallel.recompute
    policies = recompute_of(problem, row, share, bounds)
    names = tuple(dict.fromkeys(pinned)) if isinstance(pinned, list) else (RECOMPUTE[int(row.recompute)], "none")
    return _counted(policies, names, problem.layer_kinds, bounds)


@lru_cache(maxsize=4096)
def _counted(policies: tuple[str, ...], names: tuple[str, ...], layers: tuple[Kind, ...], bounds: Bounds) -> Any:
    kinds = list(dict.fromkeys(layers))
    counts = np.zeros((len(bounds), len(names), len(kinds)))
    for stage, (start, stop) in enumerate(bounds):
        for at in range(start, stop):
            counts[stage, names.index(policies[at]), kinds.index(layers[at])] += 1
    return counts


def _of_stages(costs: list[Micro], counts: Any, name: str) -> Any:
    """Return an array [rows, stages] of the costs' field ``name``, summed over the layers of each stage."""
    rows = len(counts)
    each = np.stack(
        [
            np.stack([np.broadcast_to(getattr(unit, name), rows) for unit in cost.layers.values()], axis=-1)
            for cost in costs
        ],
        axis=1,
    )
    times = np.einsum("rsvk,rvk->rs", counts, each)
    times[:, 0] += np.broadcast_to(getattr(costs[0].first, name), rows)
    times[:, -1] += np.broadcast_to(getattr(costs[0].last, name), rows)
    return times

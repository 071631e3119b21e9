"""Second bounds of pipelined layouts, from a short simulation of the schedule for many layouts at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from partool.cost.case import RECOMPUTE, SCHEDULES, Layouts
from partool.cost.kinds import Kind
from partool.cost.time.bound import bound_s, step
from partool.cost.time.micro import Micro
from partool.cost.time.sync import pipeline_wait
from partool.planner.problem import Problem
from partool.planner.search.layouts import Bounds, job_of_rows, recompute_of, splits, variant_costs
from partool.schedule import makespan, rank_of
from partool.strategies.schedules import SCHEDULES as KNOWN
from partool.strategies.schedules import WITH_WAVES

_LOOSE = 0.96
_MOST = 20_000
"""Maximum number of actions of the short simulation; longer schedules keep their first bound."""


def refined_s(problem: Problem, rows: Layouts) -> Any:
    """Return a lower bound of each row's step time.

    All rows have the same schedule, number of chunks, and number of pipeline ranks (more than one).

    The number of simulated micro-batches is the smallest number of any row, but at most the number of pipeline ranks.
    The simulation shows how long uneven stages take to fill and drain. Each further micro-batch takes at least its time
    on the busiest rank.
    """
    job = job_of_rows(problem, rows)
    first = rows.take(0)
    pp, chunks, schedule = int(first.pp), int(first.chunks), SCHEDULES[int(first.schedule)]
    short = min(int(np.min(rows.accumulation)), pp)
    longer = schedule in WITH_WAVES and np.any(rows.accumulation > pp)
    if pp * chunks * short > _MOST or longer or schedule == "file" or KNOWN[schedule].moves == "weights":
        # With more micro-batches than ranks, wave schedules are different lists of actions, found by search.
        return bound_s(job, rows)
    costs, (count,) = variant_costs(problem, rows), rows.shape
    counts = np.stack(
        [
            _counts(problem, int(policy), float(share), bounds)
            for policy, share, bounds in zip(
                np.broadcast_to(rows.recompute, count),
                np.broadcast_to(rows.recompute_share, count),
                splits(problem, rows, costs),
                strict=True,
            )
        ]
    )
    forward, backward, weight = (_stage_times(costs, counts, name) for name in ("forward_s", "backward_s", "weight_s"))
    parts = step(job, rows)
    send = np.broadcast_to(parts.send_s, (count,))
    span = makespan(
        schedule, pp, short, chunks, forward_s=forward, backward_s=backward, weight_s=weight, send_s=send
    )  # fmt: skip
    both = forward + backward
    place = np.array([rank_of(schedule, stage, pp) for stage in range(pp * chunks)])
    busiest = np.max([both[:, place == rank].sum(axis=1) for rank in range(pp)], axis=0)
    # Later rounds may fill gaps of the first round: up to 2.7 % was measured on real models.
    longer = _LOOSE * (span + (rows.accumulation - short) * busiest)
    waits = pipeline_wait(job, rows) * rows.accumulation * busiest
    return job.time_scalar * (np.maximum(longer, rows.accumulation * busiest) + waits + parts.extra_s)


def _counts(problem: Problem, policy: int, share: float, bounds: Bounds) -> Any:
    """Return an array [stages, variants, kinds] of numbers of layers; a variant is a policy that layers have."""
    pinned = problem.spec.parallel.recompute
    policies = recompute_of(problem, policy, share, bounds)
    names = tuple(dict.fromkeys(pinned)) if isinstance(pinned, list) else (RECOMPUTE[policy], "none")
    return _counted(policies, names, problem.layer_kinds, bounds)


@lru_cache(maxsize=4096)
def _counted(policies: tuple[str, ...], names: tuple[str, ...], layers: tuple[Kind, ...], bounds: Bounds) -> Any:
    kinds = list(dict.fromkeys(layers))
    counts = np.zeros((len(bounds), len(names), len(kinds)))
    for stage, (start, stop) in enumerate(bounds):
        for at in range(start, stop):
            counts[stage, names.index(policies[at]), kinds.index(layers[at])] += 1
    return counts


def _stage_times(costs: list[Micro], counts: Any, name: str) -> Any:
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

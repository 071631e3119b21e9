"""Memory of many pipelined layouts at once, from their own stages, to skip those that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import RECOMPUTE, Layouts
from partool.cost.memory.fit import fit_probability
from partool.cost.memory.in_flight import handed_over, in_flight
from partool.cost.memory.rank_parameters import MOE, RankLoad
from partool.cost.training.peak import ranks_of
from partool.planner.problem import Problem
from partool.planner.search.layouts import job_of_rows

_CLOSE = 1e-6
"""Difference of probabilities, and relative difference of bytes, that rounding may make."""


def stage_memory(problem: Problem, rows: Layouts, counts: Any, place: Any) -> tuple[Any, Any, Any]:
    """Return whether rows fit into what layouts may use of the device, their bytes, and the probability against it.

    All rows have the same schedule, number of pipeline ranks (more than one), of chunks, and limit of micro-batches in
    flight; ``rows`` have the exact shares of layers that recompute. ``counts`` are the layers [rows, stages, variants,
    kinds], the first variant being the row's policy and the other ``none``; ``place`` is 1 where a rank [ranks, stages]
    has a stage. Host memory is left out, so a row that fits may still exceed it.
    """
    count, ranks = len(counts), len(place)
    wide = rows.take(np.repeat(np.arange(count), ranks))
    memory = ranks_of(job_of_rows(problem, rows), wide, _loads(problem, rows, wide, counts, place))
    total, sigma = (
        np.broadcast_to(value, count * ranks).reshape(count, ranks)
        for value in (memory.total_bytes, memory.sigma_bytes)
    )
    each, worst = np.arange(count), np.argmax(total, axis=1)
    probability = fit_probability(total[each, worst], sigma[each, worst], problem.devices.memory_bytes)
    largest = total[each, worst]
    fits: NDArray[np.bool_] = largest <= problem.capacity_bytes * (1.0 + _CLOSE)
    return fits, largest * (1.0 - _CLOSE), np.maximum(1.0 - probability - _CLOSE, 0.0)


def _loads(problem: Problem, rows: Layouts, wide: Layouts, counts: Any, place: Any) -> RankLoad:
    """Return the load of every rank of every row, as columns with the ranks of a row one after the other.

    ``wide`` are the rows, each repeated for its ranks. Schedules that are found by search hold at least as much as the
    closed formula says.
    """
    on_ranks = np.einsum("rsvk,ps->rpvk", counts, place)
    kinds = list(dict.fromkeys(problem.layer_kinds))
    places = np.array([kind.place for kind in kinds])
    every_kind = range(MOE + len(problem.model.expert_shapes))
    by_kind = {kind: on_ranks[..., places == kind].sum(axis=-1) for kind in every_kind}
    policy = np.broadcast_to(rows.recompute, len(counts))[:, None]
    kept: dict[tuple[int, int], Any] = {}
    for kind, layers in by_kind.items():
        if kind >= MOE and kind not in places:
            continue
        for index in sorted({0, *np.unique(policy).tolist()}):
            following = np.where(policy == index, layers[:, :, 0], 0.0)
            # Where the row's policy is to recompute nothing, both variants are this policy.
            kept[kind, int(index)] = (
                following + (layers[:, :, 1] if index == RECOMPUTE.index("none") else 0.0)
            ).ravel()
    first, last = (np.tile(place[:, stage].astype(int), len(counts)) for stage in (0, -1))
    layers_of_ranks = tuple(by_kind[kind].sum(axis=-1).ravel() for kind in every_kind)
    place_of: Any = np.tile(np.arange(len(place)), len(counts))
    micro_batches = in_flight(wide, place_of)
    local_inputs = handed_over(wide, place_of, micro_batches) if np.any(wide.folded) else None
    return RankLoad(layers_of_ranks, first, last, micro_batches / wide.chunks, kept, local_inputs=local_inputs)

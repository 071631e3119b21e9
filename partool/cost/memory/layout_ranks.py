"""Layers and micro-batches of every pipeline rank of one layout, as columns with an entry per rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from partool.cost.case import RECOMPUTE, Column
from partool.cost.kinds import layer_places
from partool.cost.memory.rank_parameters import MOE, BegunStages, RankLoad, WeightRing
from partool.cost.time.pipeline import (
    activations_by_ranks,
    layers_by_ranks,
    moves_weights,
    ring_by_ranks,
    stages_of_ranks,
)
from partool.plan.layout import Layout
from partool.plan.schedule import sizes_of
from partool.schedule import begun_by_ranks
from partool.strategies.schedules import SCHEDULES
from partool.work.base import Workload


def loads_of_layout(job: Workload, layout: Layout) -> RankLoad:
    """Return the load of each pipeline rank; every layer counts under its recompute policy."""
    stages, last = stages_of_ranks(layout), len(layout.pipeline.bounds) - 1
    ring = _joined(ring_by_ranks(job, layout)) if moves_weights(layout) else None
    kept: dict[tuple[int, int], Column] = {}
    for rank, mine in enumerate(stages):
        for start, stop in (layout.pipeline.bounds[stage] for stage in mine):
            for layer in range(start, stop):
                key = layer_places(job.model)[layer], RECOMPUTE.index(layout.recompute[layer])
                counts = kept.setdefault(key, np.zeros(len(stages)))
                counts[rank] += 1  # type: ignore[index]
    layers_of_kinds = tuple(
        sum(count for (kind, _), count in kept.items() if kind == wanted)
        for wanted in range(MOE + len(job.model.expert_shapes))
    )
    begins, ends = (
        np.array([int(stage in mine or ring is not None) for mine in stages]) for stage in (0, last)
    )  # fmt: skip
    in_flight = np.array(activations_by_ranks(layout)) / np.array([len(mine) for mine in stages])
    # Larger stages may have more micro-batches in flight than the mean of a rank's stages.
    in_each = np.array([len(mine) for mine in stages]) * np.array(layers_by_ranks(layout))
    larger = in_each / np.maximum(sum(layers_of_kinds), 1)
    return RankLoad(layers_of_kinds, begins, ends, in_flight, kept, ring, larger, **_folded(layout))


def _folded(layout: Layout) -> dict[str, Any]:
    """Return what is counted from action lists where stages run back and forth over the ranks: fields of RankLoad."""
    schedule = SCHEDULES.get(layout.pipeline.schedule)
    if layout.mesh.pp == 1 or schedule is None or not schedule.folded:
        return {}
    ranks, chunks = begun_by_ranks(*sizes_of(layout)), layout.pipeline.chunks
    most = [max(moments, key=lambda moment: (moment.activations, moment.ending)) for moments in ranks]
    begun = []
    for stages in range(1, chunks + 1):
        at_stages = [{moment.stages: moment for moment in moments}.get(stages) for moments in ranks]
        begun.append(
            BegunStages(
                stages / chunks,
                np.array([moment.activations / chunks if moment else 0.0 for moment in at_stages]),
                np.array([float(moment.ending) if moment else 0.0 for moment in at_stages]),
            )
        )
    return {
        "local_inputs": np.array([float(moment.local_inputs) for moment in most]),
        "ending": np.array([float(moment.ending) for moment in most]),
        "begun": tuple(begun),
    }


def _joined(rings: list[WeightRing]) -> WeightRing:
    """Return the tensors of all ranks as columns."""
    return WeightRing(
        passes_weights=True,
        inputs=np.array([ring.inputs for ring in rings]),
        rebuilt=rings[0].rebuilt,
        weights=np.array([ring.weights for ring in rings]),
        gradients=np.array([ring.gradients for ring in rings]),
        elements=rings[0].elements,
    )

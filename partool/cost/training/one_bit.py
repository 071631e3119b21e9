"""Costs of an optimizer whose data-parallel ranks exchange one bit per element (:mod:`partool.layout.one_bit`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from partool.cost.case import Column, Layouts
from partool.layout.one_bit import CHUNK, ROW_BYTES, exchange_schedule, one_bit_bytes
from partool.layout.parameters import groups, is_frozen
from partool.layout.tensor import own_partition
from partool.layout.tensor.cutting import by_name
from partool.plan.layout import Layout
from partool.spec.model import ModelConfig
from partool.spec.training import CheckpointSpec, OptimizerSpec, TrainingSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.training import OneBitUpdates, TrainingWork

_MOVE_BYTES = 52.0
"""Bytes of memory traffic per parameter of a step without averaged gradients, beside those of an update of AdamW, with
masters of four bytes: the sum of moves, and a denominator by operators of torch."""
_EXCHANGE_BYTES = 48.0
"""The same for an exchange: compressing and opening the moves, and momenta and weights of the last exchange."""


def one_bit_updates(
    optimizer: OptimizerSpec, training: TrainingSpec, checkpoint: CheckpointSpec, validates: bool
) -> OneBitUpdates | None:
    """Return the exchanges of a run; None if the optimizer averages gradients in every step."""
    if not OPTIMIZERS[optimizer.name].whole_steps:
        return None
    schedule = exchange_schedule(optimizer, training, checkpoint, validates)
    return OneBitUpdates(tuple(schedule.counts.items()), schedule.local_most > 1)


def kept_bytes(job: TrainingWork, layouts: Layouts, trained: Column) -> Column:
    """Return the bytes of a rank's state beside moments, where it trains ``trained`` parameters."""
    if job.one_bit is None:
        return 0.0
    of_rank = 1.0 + 2.0 * job.one_bit.local  # errors; moves and weights of the last exchange
    return job.master_bytes * trained * (of_rank + 1.0 / layouts.dp)


def traffic_per_element(job: TrainingWork) -> float:
    """Return the bytes of memory traffic of a step per parameter, beside those of an update of AdamW."""
    if job.one_bit is None:
        return 0.0
    apart = 1.0 - job.one_bit.share("full")
    return job.master_bytes / 4.0 * (apart * _MOVE_BYTES + job.one_bit.share("one_bit") * _EXCHANGE_BYTES)


def message_bytes(job: TrainingWork, elements: Column) -> Column:
    """Return the bytes of the message for ``elements`` parameters, before it is cut for the ranks."""
    return elements / CHUNK * (ROW_BYTES + job.master_bytes)


def exchange_bytes(job: TrainingWork, layout: Layout, stages: Sequence[int]) -> int:
    """Return the bytes that a pipeline rank with these stages sends in one exchange of bits; the most of tensor ranks.

    Exact for partool's own decoder; for other models the sizes are those of a decoder of partool with the same widths.
    """
    mesh = layout.mesh
    bounds = tuple(layout.pipeline.bounds[stage] for stage in stages)
    ends = (0 in stages, len(layout.pipeline.bounds) - 1 in stages)
    tensor = (mesh.tp, layout.tensor.inner, layout.tensor.sequence_norms)
    return max(
        one_bit_bytes(sizes, mesh.dp, job.master_bytes)
        for sizes in _sizes(job.model, tuple(job.frozen), bounds, ends, tensor)
    )


@lru_cache(maxsize=64)
def _sizes(
    model: ModelConfig,
    frozen: tuple[str, ...],
    bounds: tuple[tuple[int, int], ...],
    ends: tuple[bool, bool],
    tensor: tuple[int, int, bool],
) -> list[list[int]]:
    """Return the numbers of elements of a pipeline rank's trained parameters, for each of its tensor ranks."""
    first, *layers, last = groups(model)
    inside = [info for start, stop in bounds for layer in layers[start:stop] for info in layer]
    infos = [*(first if ends[0] else ()), *inside, *(last if ends[1] else ())]
    trained = [info for info in infos if not is_frozen(info.name, frozen)]
    degree, inner, norms = tensor
    if degree == 1:
        return [[info.elements for info in trained]]
    rows = by_name(own_partition(model, degree, inner, norms), [info.name for info in trained])
    sizes = []
    for rank in range(degree):
        shapes = [rows[info.name].local_shape(rank) for info in trained]
        sizes.append([size for shape in shapes if (size := int(np.prod(shape)))])
    return sizes

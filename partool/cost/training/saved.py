"""Bytes of the training state that a rank writes into a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partool.cost.case import Column, Layouts
from partool.cost.codec import encode
from partool.cost.memory.layout_ranks import loads_of_layout
from partool.cost.training.host_state import moment_bytes
from partool.cost.training.one_bit import kept_bytes
from partool.cost.training.states import ElementCounts, element_counts, state_shards
from partool.plan.layout import Layout
from partool.work.training import TrainingWork


class SavedState(NamedTuple):
    """What the rank that writes most writes into a checkpoint."""

    saved_bytes: int
    """Bytes of all its blocks."""
    saved_block_bytes: int
    """Bytes that its largest block has at most."""


def saved_state(job: TrainingWork, layout: Layout) -> SavedState:
    """Return the bytes that a rank of partool's runtime writes: master weights and moments, each block once.

    A job that does not train writes no checkpoints.
    Of several ranks that hold the same block, the one that has least to write writes it; here they are taken to write
    equal parts.
    """
    if not job.backward:
        return SavedState(0, 0)
    layouts = encode(layout)
    counts = element_counts(job, layouts, loads_of_layout(job, layout))
    trained = _written(layouts, counts.trained, counts.trained_expert)
    weights = job.master_bytes * _written(layouts, counts.common, counts.expert)
    total = weights + _moments(job, layouts, counts, trained)
    block = job.master_bytes * np.ceil(counts.largest / state_shards(layouts))
    return SavedState(round(float(np.max(total))), round(float(np.max(np.minimum(block, total)))))


def _moments(job: TrainingWork, layouts: Layouts, counts: ElementCounts, trained: Column) -> Column:
    on_host = 1.0 - layouts.gpu_fraction
    moments_bytes = np.where(on_host > 0, moment_bytes(job), job.moments * job.master_bytes) * trained
    if job.matrices is not None:
        matrices = _written(layouts, counts.matrices, counts.matrices_expert)
        moments_bytes = moments_bytes - (job.moments - job.matrices.moments) * job.master_bytes * matrices
    moments_bytes = moments_bytes + job.average_bytes * trained
    return moments_bytes + kept_bytes(job, layouts, trained * layouts.dp * layouts.cp)


def _written(layouts: Layouts, common: Column, expert: Column) -> Column:
    """Return a rank's part of what all ranks with the same stage write; arguments are the elements before ZeRO."""
    ranks = layouts.dp * layouts.cp
    return common / ranks + expert * layouts.expert_ranks / (ranks * np.where(layouts.ep > 1, layouts.tp, 1))

"""Fills the figures of a whole training into a plan."""

from __future__ import annotations

from math import ceil

from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.layout import Layout
from partool.plan.totals import Totals
from partool.plan.types import TimePrediction
from partool.planner.data_counts import DataCounts
from partool.planner.problem import Problem
from partool.spec.spec import Spec
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.base import COMPUTE_BYTES
from partool.work.training import MASTER_BYTES


def totals(problem: Problem, layout: Layout, time: TimePrediction, counts: DataCounts, saved_bytes: int) -> Totals:
    """Return the figures of a layout's whole training, or of another job.

    ``saved_bytes`` is the part of a checkpoint that a rank writes.
    """
    spec, training = problem.spec, problem.spec.training
    trained = training.steps * training.global_batch * training.sequence_length
    if not problem.job.backward and counts.tokens is not None:
        trained = min(trained, counts.tokens)
    master = MASTER_BYTES[training.precision]
    in_bf16 = layout.offload.optimizer != "none" and spec.parallel.offload.moments == "bf16"
    moment = 2 if in_bf16 else master
    frozen = problem.frozen
    written = 0
    if OPTIMIZERS[spec.optimizer.name].whole_steps:  # each rank writes what its own messages left out
        written = saved_bytes * layout.mesh.world_size
    elif problem.job.backward:
        written = checkpoint_bytes(
            problem.model,
            spec.optimizer.name,
            frozen,
            weight_bytes=master,
            moment_bytes=moment,
            frozen_bytes=COMPUTE_BYTES[training.precision],
        )
    figures = Totals(
        trained_tokens=trained,
        data_tokens=counts.tokens,
        data_unknown=counts.unknown,
        data_rows=counts.rows,
        data_samples=counts.samples,
        epochs=_epochs(counts, spec),
        checkpoint_bytes=written,
        price_per_device_hour=spec.hardware.price_per_device_hour,
    )
    return figures.priced(time.device_hours)


def time_of_one_reading(problem: Problem, time: TimePrediction, counts: DataCounts) -> TimePrediction:
    """Return the time of a job that reads its data once and ends, where the number of their tokens is known."""
    training = problem.spec.training
    if counts.tokens is None:
        return time
    rows = counts.rows if counts.samples and counts.rows else counts.tokens / training.sequence_length
    steps = min(training.steps, ceil(rows / training.global_batch))
    share = steps / training.steps
    return time.model_copy(update={"total_s": share * time.total_s, "device_hours": share * time.device_hours})


def _epochs(counts: DataCounts, spec: Spec) -> float | None:
    """Return the number of times that a training reads its data; None if their sequences are not counted."""
    trained = spec.training.steps * spec.training.global_batch
    if counts.samples and counts.rows:
        return trained / counts.rows
    if not counts.tokens or not spec.data.pack:
        return None
    return trained * spec.training.sequence_length / counts.tokens

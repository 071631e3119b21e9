"""Fills the figures of a whole training into a plan."""

from __future__ import annotations

from math import ceil

from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.layout import Layout
from partool.plan.totals import Totals
from partool.plan.types import TimePrediction
from partool.planner.data_counts import DataCounts, count_data
from partool.planner.problem import Problem
from partool.planner.rules.data_size import UncountedError
from partool.spec.data import DataSpec
from partool.spec.training import TrainingSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.training import MASTER_BYTES


def totals(problem: Problem, layout: Layout, time: TimePrediction, data: DataSpec, saved_bytes: int) -> Totals:
    """Return the figures of a layout's whole training, or of another job.

    ``data`` is the spec's section with absolute paths, ``saved_bytes`` the part of a checkpoint that a rank writes.
    """
    spec, training = problem.spec, problem.spec.training
    trained = training.steps * training.global_batch * training.sequence_length
    counts, unknown = _counted(data, training.sequence_length, trains=problem.job.backward)
    data_tokens = None if counts is None else counts.tokens
    if not problem.job.backward and data_tokens is not None:
        trained = min(trained, data_tokens)
    master = MASTER_BYTES[training.precision]
    in_bf16 = layout.offload.optimizer != "none" and spec.parallel.offload.moments == "bf16"
    moment = 2 if in_bf16 else master
    frozen = spec.model.frozen
    written = 0
    if OPTIMIZERS[spec.optimizer.name].whole_steps:  # each rank writes what its own messages left out
        written = saved_bytes * layout.mesh.world_size
    elif problem.job.backward:
        written = checkpoint_bytes(problem.model, spec.optimizer.name, frozen, weight_bytes=master, moment_bytes=moment)
    figures = Totals(
        trained_tokens=trained,
        data_tokens=data_tokens,
        data_unknown=unknown,
        data_rows=None if counts is None else counts.rows,
        data_samples=0 if counts is None else counts.samples,
        epochs=_epochs(counts, training, data),
        checkpoint_bytes=written,
        price_per_device_hour=spec.hardware.price_per_device_hour,
    )
    return figures.priced(time.device_hours)


def time_of_one_reading(problem: Problem, time: TimePrediction, data: DataSpec) -> TimePrediction:
    """Return the time of a job that reads its data once and ends, where the number of their tokens is known."""
    training = problem.spec.training
    counts, _ = _counted(data, training.sequence_length, trains=False)
    if counts is None:
        return time
    rows = counts.tokens / training.sequence_length if data.is_text else counts.rows or 0
    steps = min(training.steps, ceil(rows / training.global_batch))
    share = steps / training.steps
    return time.model_copy(update={"total_s": share * time.total_s, "device_hours": share * time.device_hours})


def _counted(data: DataSpec, sequence_length: int, *, trains: bool) -> tuple[DataCounts | None, str]:
    """Return what a job reads, or None and the reason why it is unknown."""
    try:
        return count_data(data, sequence_length, trains=trains), ""
    except UncountedError as error:
        return None, str(error)


def _epochs(counts: DataCounts | None, training: TrainingSpec, data: DataSpec) -> float | None:
    """Return the number of times that a training reads its data; None if nobody has counted their sequences."""
    if counts is None:
        return None
    if data.is_text:
        trained = training.steps * training.global_batch * training.sequence_length
        return trained / counts.tokens if counts.tokens and data.pack else None
    return training.steps * training.global_batch / counts.rows if counts.rows else None

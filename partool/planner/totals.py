"""Fills the figures of a whole training into a plan."""

from __future__ import annotations

from math import ceil

from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.layout import Layout
from partool.plan.totals import Totals
from partool.plan.types import TimePrediction
from partool.planner.problem import Problem
from partool.planner.rules.data_size import UncountedError, count_tokens
from partool.spec.training import DataSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.base import COMPUTE_BYTES
from partool.work.training import MASTER_BYTES


def totals(problem: Problem, layout: Layout, time: TimePrediction, data: DataSpec, saved_bytes: int) -> Totals:
    """Return the figures of a layout's whole training, or of another job.

    ``data`` is the spec's section with absolute paths, ``saved_bytes`` the part of a checkpoint that a rank writes.
    """
    spec, training = problem.spec, problem.spec.training
    trained = training.steps * training.global_batch * training.sequence_length
    data_tokens, unknown = _data_tokens(data, trains=problem.job.backward)
    if not problem.job.backward and data_tokens is not None:
        trained = min(trained, data_tokens)
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
        data_tokens=data_tokens,
        data_unknown=unknown,
        epochs=trained / data_tokens if data_tokens and data.pack else None,
        checkpoint_bytes=written,
        price_per_device_hour=spec.hardware.price_per_device_hour,
    )
    return figures.priced(time.device_hours)


def time_of_one_reading(problem: Problem, time: TimePrediction, data: DataSpec) -> TimePrediction:
    """Return the time of a job that reads its data once and ends, where the number of their tokens is known."""
    training = problem.spec.training
    tokens, _ = _data_tokens(data, trains=False)
    if tokens is None:
        return time
    steps = min(training.steps, ceil(tokens / (training.global_batch * training.sequence_length)))
    share = steps / training.steps
    return time.model_copy(update={"total_s": share * time.total_s, "device_hours": share * time.device_hours})


def _data_tokens(data: DataSpec, *, trains: bool) -> tuple[int | None, str]:
    """Return the number of tokens that a job reads, or None and the reason why it is unknown.

    Training reads those that are not held out for validation, other jobs those that are, or all.
    """
    share = 1.0 - data.validation if trains else data.validation or 1.0
    try:
        return round(count_tokens(data) * share), ""
    except UncountedError as error:
        return None, str(error)

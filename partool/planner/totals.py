"""Fills the figures of a whole training into a plan."""

from __future__ import annotations

from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.layout import Layout
from partool.plan.totals import Totals
from partool.plan.types import TimePrediction
from partool.planner.problem import Problem
from partool.planner.rules.data_size import UncountedError, count_tokens
from partool.spec.training import DataSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.training import MASTER_BYTES


def totals(problem: Problem, layout: Layout, time: TimePrediction, data: DataSpec, saved_bytes: int) -> Totals:
    """Return the figures of the training of a layout.

    ``data`` is the spec's section with absolute paths, ``saved_bytes`` the part of a checkpoint that a rank writes.
    """
    spec, training = problem.spec, problem.spec.training
    trained = training.steps * training.global_batch * training.sequence_length
    data_tokens, unknown = _data_tokens(data)
    master = MASTER_BYTES[training.precision]
    in_bf16 = layout.offload.optimizer != "none" and spec.parallel.offload.moments == "bf16"
    moment = 2 if in_bf16 else master
    frozen = spec.model.frozen
    written = checkpoint_bytes(problem.model, spec.optimizer.name, frozen, weight_bytes=master, moment_bytes=moment)
    if OPTIMIZERS[spec.optimizer.name].whole_steps:  # each rank writes what its own messages left out
        written = saved_bytes * layout.mesh.world_size
    if not problem.job.backward:
        written = 0
    figures = Totals(
        trained_tokens=trained,
        data_tokens=data_tokens,
        data_unknown=unknown,
        epochs=trained / data_tokens if data_tokens and data.pack else None,
        checkpoint_bytes=written,
        price_per_device_hour=spec.hardware.price_per_device_hour,
    )
    return figures.priced(time.device_hours)


def _data_tokens(data: DataSpec) -> tuple[int | None, str]:
    """Return the number of tokens that are not held out for validation, or None and the reason why it is unknown."""
    try:
        return round(count_tokens(data) * (1.0 - data.validation)), ""
    except UncountedError as error:
        return None, str(error)

"""Fills the figures of a whole training into a plan."""

from __future__ import annotations

from partool.cost.case import MASTER_BYTES
from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.layout import Layout
from partool.plan.totals import Totals
from partool.plan.types import TimePrediction
from partool.planner.checks.data_size import UncountedError, count_tokens
from partool.planner.problem import Problem
from partool.spec.training import DataSpec


def totals(problem: Problem, layout: Layout, time: TimePrediction, data: DataSpec) -> Totals:
    """Return the figures of the training of a layout; ``data`` is the spec's section with absolute paths."""
    spec, training = problem.spec, problem.spec.training
    trained = training.steps * training.global_batch * training.sequence_length
    held, unknown = _data_tokens(data)
    master = MASTER_BYTES[training.precision]
    in_bf16 = layout.offload.optimizer != "none" and spec.parallel.offload.moments == "bf16"
    found = Totals(
        trained_tokens=trained,
        data_tokens=held,
        data_unknown=unknown,
        epochs=trained / held if held and data.pack else None,
        checkpoint_bytes=checkpoint_bytes(
            problem.model,
            spec.optimizer.name,
            spec.model.frozen,
            weight_bytes=master,
            moment_bytes=2 if in_bf16 else master,
        ),
        price_per_device_hour=spec.hardware.price_per_device_hour,
    )
    return found.priced(time.device_hours)


def _data_tokens(data: DataSpec) -> tuple[int | None, str]:
    """Return the number of tokens that are not held out for validation, or None and the reason why it is unknown."""
    try:
        return round(count_tokens(data) * (1.0 - data.validation)), ""
    except UncountedError as error:
        return None, str(error)

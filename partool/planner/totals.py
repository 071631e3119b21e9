"""Fills the figures of a whole training into a plan."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from partool.cost.training.predict import time_terms
from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.layout import Layout
from partool.plan.totals import Totals
from partool.plan.types import TimePrediction
from partool.planner.data_counts import DataCounts
from partool.planner.problem import Problem
from partool.planner.search.price import Priced
from partool.spec.spec import Spec
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.base import COMPUTE_BYTES
from partool.work.evaluation import forward_only
from partool.work.training import MASTER_BYTES

_SUM_BYTES = 8
"""Bytes of the reference's log-probability of a document (float64)."""


class ReferencePass(NamedTuple):
    """What it costs to keep the reference's log-probabilities."""

    s: float
    """Seconds of the pass over the data before the first step."""
    file_bytes: int | None
    """Bytes of the file; None where the documents are not counted."""


def reference_pass(problem: Problem, best: Priced, counts: DataCounts) -> ReferencePass | None:
    """Return the price of the pass that keeps the reference's log-probabilities; None where there is none.

    Each sequence that the steps and the validations read passes once, forward.
    """
    training, data = problem.spec.training, problem.spec.data
    if not (problem.job.backward and training.objective.keeps_reference):
        return None
    rows = training.steps * training.global_batch
    rows = min(rows, counts.rows or rows) + training.validation.samples * data.validations
    step_s = sum(time_terms(forward_only(best.job), best.layout).values())
    return ReferencePass(step_s * rows / training.global_batch, _SUM_BYTES * counts.documents or None)


def validation_s(problem: Problem, best: Priced) -> float | None:
    """Return the seconds of one validation of all sets with as many sequences as a validation has at most.

    None where a training validates nothing. A set's last micro-batches are filled up; an average of the weights that
    is validated beside the weights takes as long as they do. Each new token of the prompts takes a pass over all of
    them, which goes through the stages of a pipeline one after the other.
    """
    training, data, mesh = problem.spec.training, problem.spec.data, best.layout.mesh
    if not (problem.job.backward and data.validates):
        return None
    step_s = sum(time_terms(forward_only(best.job), best.layout).values())
    together = best.layout.micro_batch * mesh.dp
    rows = ceil(training.validation.samples / together) * together * data.validations
    both = training.ema is not None and training.ema.validation == "both"
    of_sets = step_s * rows / training.global_batch * (1 + both)
    prompts, stages = training.validation.prompts, mesh.pp
    rounds = ceil(len(prompts) / together)
    in_flight = training.global_batch / together + stages - 1  # what a step's time is of, in passes of one stage
    of_prompts = training.validation.new_tokens * step_s * (rounds + stages - 1) / in_flight if prompts else 0.0
    return of_sets + of_prompts


def with_reference_pass(time: TimePrediction, reference: ReferencePass | None, world_size: int) -> TimePrediction:
    """Return the time of a training that begins with the pass of a reference, if there is one."""
    if reference is None:
        return time
    hours = time.device_hours + reference.s * world_size / 3600.0
    return time.model_copy(update={"total_s": time.total_s + reference.s, "device_hours": hours})


def totals(
    problem: Problem,
    layout: Layout,
    time: TimePrediction,
    counts: DataCounts,
    saved_bytes: int,
    *,
    reference: ReferencePass | None = None,
    validation_s: float | None = None,
) -> Totals:
    """Return the figures of a layout's whole training, or of another job.

    ``saved_bytes`` is the part of a checkpoint that a rank writes.
    """
    spec, training = problem.spec, problem.spec.training
    trained = training.steps * training.global_batch * training.sequence_length
    if not problem.job.backward and spec.evaluation.tasks:
        trained = 0
    elif not problem.job.backward and counts.tokens is not None:
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
            average_bytes=0 if training.ema is None else master,
        )
    figures = Totals(
        trained_tokens=trained,
        data_tokens=counts.tokens,
        data_unknown=counts.unknown,
        data_rows=counts.rows,
        data_samples=counts.samples,
        epochs=_epochs(counts, spec),
        reference_s=None if reference is None else reference.s,
        reference_bytes=None if reference is None else reference.file_bytes,
        validation_s=validation_s,
        checkpoint_bytes=written,
        price_per_device_hour=spec.hardware.price_per_device_hour,
    )
    return figures.priced(time.device_hours)


def time_of_one_reading(problem: Problem, time: TimePrediction, counts: DataCounts) -> TimePrediction:
    """Return the time of a job that reads its data once and ends, where the number of their tokens is known.

    The time of tasks is in no total.
    """
    training = problem.spec.training
    if problem.spec.evaluation.tasks:  # nobody has counted their requests
        return time.model_copy(update={"total_s": 0.0, "device_hours": 0.0})
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

"""Checks of objectives that compare pairs of answers, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.spec.objective import READS
from partool.spec.spec import Spec
from partool.strategies.schedules import MOVING_WEIGHTS

_PATH = ("training", "objective")


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about an objective and its data, settings that it does not read, and what it does not run with."""
    spec = problem.spec
    objective = spec.training.objective
    yield from _data(problem)
    if spec.training.validation.prompts:
        for conflicts, what, instead in _without_positions(spec):
            if conflicts:
                path = ("training", "validation", "prompts")
                help = f"use {instead}, or drop prompts"
                yield Diagnostic("PT427", f"prompts are not continued with {what}", path=path, help=help)
    read = READS[objective.kind] if objective.form == "sigmoid" else ("beta", "form", "reference")
    for name in sorted(objective.model_fields_set - {"kind", *read}):
        of = f"form: {objective.form}" if name in READS[objective.kind] else f"objective: {objective.kind}"
        message = f"{name} has no meaning for {of}"
        yield Diagnostic("PT296", message, path=(*_PATH, name), help="drop it")
    if not objective.prefers:
        return
    if objective.has_reference:
        yield from _reference(spec)
    for conflicts, what, instead in _excluded(spec):
        if conflicts:
            message = f"objective: {objective.kind} does not run with {what}"
            yield Diagnostic("PT420", message, path=_PATH, help=f"use {instead}, or objective: sft")


def _data(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding where the objective, or the job, does not fit the records."""
    spec = problem.spec
    kind, records = spec.training.objective.kind, spec.data.records
    if spec.data.is_preference and not problem.job.backward:
        message = f"job: {problem.job.name} computes the loss of texts and answers, and the records are pairs of them"
        yield Diagnostic("PT295", message, path=("data",), help="name data of text, chat or instruct records")
    elif spec.data.is_preference != spec.training.objective.prefers and problem.job.backward:
        message = f"objective: {kind} does not train on {records} records"
        help = "objective: dpo, orpo or simpo trains on preferences"
        if not spec.data.is_preference:
            help = "name records with a prompt, a chosen and a rejected answer, or drop objective"
        yield Diagnostic("PT295", message, path=_PATH, help=help)
    for name, part in spec.data.named.items():
        if part.is_preference != spec.data.is_preference:
            message = f"the set {name} holds {part.records} records, and the training's data {records} records"
            help = "pairs of answers are validated where the training is on pairs, all other records elsewhere"
            yield Diagnostic("PT295", message, path=("data", "validation_sets", name), help=help)
    if spec.data.is_preference and spec.data.attend == "sequence":
        message = "attend: sequence lets a rejected answer see the chosen one, which shares its sequence"
        yield Diagnostic("PT295", message, path=("data", "attend"), help="drop attend")


def _reference(spec: Spec) -> Iterator[Diagnostic]:
    """Yield findings about a reference that the model cannot have."""
    path, adapter = (*_PATH, "reference"), spec.adapter
    reference = spec.training.objective.reference
    if reference == "adapter_off" and adapter is None:
        message = "reference: adapter_off compares with the model without its adapter, and there is no adapter"
        yield Diagnostic("PT421", message, path=path, help="use reference: kept, or write the section adapter")
    elif reference == "adapter_off" and adapter is not None and adapter.train:
        message = f"reference: adapter_off: {', '.join(adapter.train)} are trained in full, so they change, too"
        yield Diagnostic("PT422", message, path=path, help="use reference: kept or copy, or drop adapter.train")
    if reference == "copy" and spec.parallel.offload.parameters == "nvme":
        message = "reference: copy keeps a second model, whose parameters are not read from files"
        yield Diagnostic("PT423", message, path=path, help="use reference: kept, or offload.parameters: cpu")


def _excluded(spec: Spec) -> tuple[tuple[bool, str, str], ...]:
    """Return what pairs of answers cannot have: whether the spec has it, in words, and what to write instead."""
    training = spec.training
    return (
        *_without_positions(spec),
        (bool(training.z_loss), "z_loss, which is no part of a log-probability", "z_loss: 0"),
        (bool(training.adversarial.epsilon), "perturbed embeddings", "adversarial: {epsilon: 0}"),
        (spec.optimizer.name.startswith("zero_one"), f"optimizer: {spec.optimizer.name}", "optimizer: adamw"),
        (spec.engine != "partool", f"engine: {spec.engine}", "engine: partool"),
    )


def _without_positions(spec: Spec) -> tuple[tuple[bool, str, str], ...]:
    """Return the layouts in which single positions are not looked at, as :func:`_excluded` does."""
    shape, schedule = spec.parallel.tensor.shape, spec.parallel.pipeline.schedule
    return (
        (schedule in MOVING_WEIGHTS, f"schedule: {schedule}", "schedule: 1f1b"),
        (shape != "auto" and shape[1] > 1, "two-dimensional tensor parallelism", "a tensor.shape of [ranks, 1]"),
    )


def sentences(problem: Problem) -> list[str]:
    """Return a sentence for the plan on what an objective costs beside its steps."""
    objective = problem.spec.training.objective
    if not objective.prefers:
        return []
    loss = "the loss of each token is computed by torch's operators, in float32 or wider"
    if not objective.has_reference:
        return [f"Objective {objective.kind}: pairs of answers share a sequence; {loss}."]
    return [
        f"Objective {objective.kind}: pairs of answers share a sequence; {loss}. {_REFERENCES[objective.reference]}"
    ]


_REFERENCES = {
    "kept": "Before step 1, one pass over the data without gradients computes the log-probabilities of the model that "
    "training starts from; it is in the time of the training, and in no step.",
    "adapter_off": "In every step, the model without its adapter goes over the micro-batches first, without gradients; "
    "this is in the time of a forward pass.",
    "copy": "In every step, a frozen copy of the first weights goes over the micro-batches first, without gradients; "
    "this is in the time of a forward pass, and the copy in the memory of parameters.",
}

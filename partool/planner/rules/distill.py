"""Checks of ``training.distill`` against its student, and what a teacher settles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partool.diagnostics.record import Diagnostic
from partool.layout.parameters import count, parameters
from partool.layout.tensor import Decided
from partool.plan.layout import Layout
from partool.plan.teaching import layout_of_teacher
from partool.planner.problem import Problem
from partool.planner.rules.tensor_cuts import partition
from partool.spec.model import ModelConfig
from partool.spec.spec import Spec

_PATH = ("training", "distill")
_ATTENTION = ("heads", "kv_heads", "head_dim", "mla", "layer_types", "window", "grid", "sinks")
"""Fields that decide how sequence ranks divide attention; the kinds of layers count once each."""


def settled(spec: Spec, student: ModelConfig, teacher: ModelConfig | None) -> Spec:
    """Return the spec with the values of ``parallel`` that alone run with a teacher, where it leaves them ``auto``."""
    if teacher is None:
        return spec
    parallel, update = spec.parallel, dict[str, object]()
    if parallel.pipeline.stages == "auto":
        update["pipeline"] = parallel.pipeline.model_copy(update={"stages": 1})
    if parallel.sequence.degree == "auto" and _differing(student, teacher):
        update["sequence"] = parallel.sequence.model_copy(update={"degree": 1})
    if parallel.tensor.shape == "auto" and parallel.tensor.degree != "auto":
        update["tensor"] = parallel.tensor.model_copy(update={"shape": [parallel.tensor.degree, 1]})
    if parallel.offload.parameters == "auto":
        update["offload"] = parallel.offload.model_copy(update={"parameters": "none"})
    if parallel.expert == "auto" and student.moe is not None and not _divides(student, teacher):
        update["expert"] = 1
    return spec.model_copy(update={"parallel": parallel.model_copy(update=update)})


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about a teacher that does not fit the student, and about what no teacher runs with."""
    spec, teacher = problem.spec, problem.teacher
    distill = spec.training.distill
    if distill is None or not problem.job.backward:
        return
    for conflicts, what, instead in _excluded(problem):
        if conflicts:
            yield Diagnostic("PT404", f"distill does not run with {what}", path=_PATH, help=f"use {instead}")
    if teacher is not None:
        yield from _fits(problem, teacher)
    taught, steps = distill.taught_steps(spec.training.steps), spec.training.steps
    if isinstance(distill.until, int) and distill.until > steps:
        message = f"until: {distill.until} is more than the {steps} steps, so that the teacher stays to the end"
        help = "use a smaller number, a share such as 0.8, or drop until"
        yield Diagnostic("PT682", message, severity="warning", path=(*_PATH, "until"), help=help)
    elif distill.until is not None and taught == steps:
        message = f"until: {distill.until} of {steps} steps are all of them, so that the teacher stays to the end"
        yield Diagnostic("PT682", message, "note", (*_PATH, "until"), help="drop until, or use a smaller number")


def check_layout(problem: Problem, layout: Layout) -> Iterator[Diagnostic]:
    """Yield a finding if a teacher cannot be cut as a layout cuts its student."""
    teacher = problem.teacher
    if teacher is None:
        return
    expert = layout.expert
    if teacher.moe is not None and teacher.moe.experts % expert:
        message = f"{expert} ranks that divide the student's experts cannot divide the teacher's {teacher.moe.experts}"
        yield Diagnostic("PT404", message, path=_PATH, help="use parallel.expert: 1, or a divisor of both numbers")
        return
    for finding in partition_of_teacher(problem, teacher, layout).findings:
        if finding.severity == "error":
            message = f"the teacher cannot be cut over {layout.tensor.degree} tensor ranks: {finding.message}"
            yield Diagnostic("PT404", message, path=_PATH, help="use parallel.tensor: 1, or another degree")


def partition_of_teacher(problem: Problem, teacher: ModelConfig, layout: Layout) -> Decided:
    """Return how the tensor ranks of a layout share the teacher's parameters, and findings about it."""
    alone = replace(problem, model=teacher, teacher=None)
    return partition(alone, layout_of_teacher(layout, teacher))


def _excluded(problem: Problem) -> tuple[tuple[bool, str, str], ...]:
    """Return what a teacher does not run with: whether the spec has it, in words, and what to write instead."""
    spec, teacher = problem.spec, problem.teacher
    training, parallel = spec.training, spec.parallel
    shape, degree = parallel.tensor.shape, parallel.sequence.degree
    apart = "" if teacher is None else _differing(problem.model, teacher)
    return (
        (parallel.pipeline.stages not in ("auto", 1), "a pipeline", "pipeline: {stages: 1}"),
        (shape != "auto" and shape[1] > 1, "two-dimensional tensor parallelism", "a tensor.shape of [ranks, 1]"),
        (problem.described is not None, "a model of other code", "model.config in place of model.hf or module"),
        (training.objective.prefers, f"objective: {training.objective.kind}", "objective: sft"),
        (bool(training.adversarial.epsilon), "perturbed embeddings", "adversarial: {epsilon: 0}"),
        (spec.adapter is not None, "an adapter", "a student whose own weights are trained"),
        (training.precision == "fp8", "products in fp8", "precision: bf16"),
        (spec.optimizer.name.startswith("zero_one"), f"optimizer: {spec.optimizer.name}", "optimizer: adamw"),
        (parallel.offload.parameters not in ("auto", "none"), "parameters off the device", "offload.parameters: none"),
        (bool(parallel.data.leaves) and parallel.data.leaves != "auto", "leaves", "no parallel.data.leaves"),
        (spec.engine != "partool", f"engine: {spec.engine}", "engine: partool"),
        (degree not in ("auto", 1) and bool(apart), f"sequence ranks, as {apart} of both models differ", "sequence: 1"),
    )


def _fits(problem: Problem, teacher: ModelConfig) -> Iterator[Diagnostic]:
    """Yield findings where the teacher cannot predict what the student is trained on."""
    path, student, length = (*_PATH, "teacher"), problem.model, problem.spec.training.sequence_length
    if teacher.vocab != student.vocab:
        message = f"the teacher predicts {teacher.vocab:,} tokens and the student {student.vocab:,}: the divergence"
        message += " compares the same tokens"
        help = f"use a student with model.vocab: {teacher.vocab} and the teacher's tokenizer, or another teacher"
        yield Diagnostic("PT681", message, path=path, help=help)
    if teacher.position == "learned" and teacher.max_position < length:
        message = f"the teacher has {teacher.max_position} learned positions, and sequences have {length} tokens"
        help = f"use training.sequence_length: {teacher.max_position} or less"
        yield Diagnostic("PT681", message, path=path, help=help)


def _differing(student: ModelConfig, teacher: ModelConfig) -> str:
    """Return the first field by which sequence ranks would divide both models' attention differently; else empty."""

    def of(model: ModelConfig, name: str) -> object:
        value = getattr(model, name)
        return frozenset(value) if name == "layer_types" else value

    return next((name for name in _ATTENTION if of(student, name) != of(teacher, name)), "")


def _divides(student: ModelConfig, teacher: ModelConfig) -> bool:
    """Return whether each number of ranks that divides the student's experts divides the teacher's, too."""
    return teacher.moe is None or student.moe is None or teacher.moe.experts % student.moe.experts == 0


def sentences(problem: Problem) -> list[str]:
    """Return a sentence for the plan on what a teacher costs."""
    distill, teacher = problem.spec.training.distill, problem.teacher
    if distill is None or teacher is None or not problem.job.backward:
        return []
    steps = problem.spec.training.steps
    taught = distill.taught_steps(steps)
    size = count(parameters(teacher)) / 1e9
    text = (
        f"Distillation: a teacher of {size:.3g} B parameters goes over each micro-batch first, without gradients, in "
    )
    text += "all steps" if taught == steps else f"the first {taught:,} of {steps:,} steps"
    text += f"; KL has the weight {distill.weight:g} at temperature {distill.temperature:g}. "
    text += "Its weights are in the memory of parameters, its passes in the time of a forward pass"
    return [text + ("." if taught == steps else ": times and traffic are the mean of all steps.")]

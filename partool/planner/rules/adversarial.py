"""Checks of adversarial training, and what it settles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.spec.spec import Spec

if TYPE_CHECKING:
    from partool.planner.problem import Problem

_PATH = ("training", "adversarial")


def whole_models(spec: Spec) -> Spec:
    """Return the spec with one pipeline stage if it perturbs embeddings and leaves the stages ``auto``."""
    pipeline = spec.parallel.pipeline
    if not spec.training.adversarial.epsilon or pipeline.stages != "auto":
        return spec
    parallel = spec.parallel.model_copy(update={"pipeline": pipeline.model_copy(update={"stages": 1})})
    return spec.model_copy(update={"parallel": parallel})


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about what does not go together with perturbed embeddings, and a start after the last step."""
    training, parallel = problem.spec.training, problem.spec.parallel
    asked = training.adversarial
    if not asked.epsilon:
        return
    shape = parallel.tensor.shape
    excluded = (
        (parallel.pipeline.stages not in ("auto", 1), "a pipeline", "pipeline: {stages: 1}"),
        (shape != "auto" and shape[1] > 1, "two-dimensional tensor parallelism", "a tensor.shape of [ranks, 1]"),
        (problem.model.moe is not None, "layers of experts", "a dense model"),
        (problem.spec.engine != "partool", f"engine: {problem.spec.engine}", "engine: partool"),
    )
    for conflicts, what, instead in excluded:
        if conflicts:
            message = f"training.adversarial perturbs embeddings, which does not run with {what}"
            yield Diagnostic("PT498", message, path=_PATH, help=f"use {instead}, or epsilon: 0")
    if asked.start_step >= training.steps:
        message = f"start_step: {asked.start_step} is not below steps: {training.steps}, so no embedding is perturbed"
        help = "lower start_step, or drop training.adversarial"
        yield Diagnostic("PT499", message, severity="warning", path=(*_PATH, "start_step"), help=help)


def sentences(problem: Problem) -> list[str]:
    """Return a sentence for the plan on what perturbed embeddings cost."""
    training = problem.spec.training
    share = training.adversarial.share(training.steps)
    if not share:
        return []
    return [
        f"Perturbed embeddings in {share:.0%} of the steps, from step {training.adversarial.start_step} on: each "
        "micro-batch runs once more before, without gradients of weights. Times and traffic are the mean of all steps."
    ]

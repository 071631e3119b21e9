"""What a kind of job settles in its plans, and findings about settings that it does not read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.spec.parallel import ParallelSpec
from partool.spec.spec import Spec


def setting_at(parallel: ParallelSpec, path: str) -> Any:
    """Return the value of a field of ``parallel``, such as ``data.zero``."""
    return reduce(getattr, path.split("."), parallel)


def with_setting(parallel: ParallelSpec, path: str, value: Any) -> ParallelSpec:
    """Return a copy of ``parallel`` in which the field at ``path`` is ``value``."""
    section, _, name = path.partition(".")
    if name:
        value = getattr(parallel, section).model_copy(update={name: value})
    return parallel.model_copy(update={section: value})


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about settings that the job does not read, and about layouts that it does not have."""
    job, spec = problem.job, problem.spec
    for path in job.unread:
        if _is_written(spec, path):
            message = f"{path} has no meaning for job: {job.name}"
            yield Diagnostic("PT289", message, path=tuple(path.split(".")), help="drop it, or write job: train")
    for field, value in job.settled.items():
        if (given := setting_at(spec.parallel, field)) != value:
            message = f"{field}: {given} is not for job: {job.name}, whose plans have {value}"
            yield Diagnostic(
                "PT290", message, path=("parallel", *field.split(".")), help=f"drop it, or use {value}, or job: train"
            )
    if not job.backward and spec.model.weights.source in ("init", "dummy"):
        message = f"weights: {spec.model.weights.source} are drawn at random, so the loss says nothing about a model"
        help = "name trained weights: model: {weights: {source: checkpoint, path: FOLDER}}, or source: hf"
        yield Diagnostic("PT291", message, severity="warning", path=("model", "weights"), help=help)
    if job.name != "train" and spec.engine != "partool":
        message = f"engine: {spec.engine} is for job: train; partool itself runs job: {job.name}"
        yield Diagnostic("PT290", message, path=("engine",), help="drop engine, or write job: train")


def _is_written(spec: Spec, path: str) -> bool:
    """Return whether the user wrote the section or field at ``path``."""
    section, _, name = path.partition(".")
    return name in getattr(spec, section).model_fields_set if name else section in spec.model_fields_set

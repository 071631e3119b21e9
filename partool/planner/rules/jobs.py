"""What a kind of job settles in its plans, and findings about settings that it does not read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.spec._base import Section
from partool.spec.parallel import ParallelSpec


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
        if written := _written(spec, tuple(path.split("."))):
            message = f"{path} has no meaning for job: {job.name}"
            yield Diagnostic("PT289", message, path=written, help="drop it, or write job: train")
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


def _written(section: Section, path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the first field that the user wrote at ``path`` or below it; empty if there is none."""
    names = path[:1] or tuple(sorted(section.model_fields_set))[:1]
    if not names or names[0] not in section.model_fields_set:
        return ()
    value, rest = getattr(section, names[0]), path[1:]
    below = _written(value, rest) if isinstance(value, Section) else ()
    return (*names, *below) if below or not rest else ()

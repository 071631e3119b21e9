"""Rules about figures that decide what is kept and when a run ends: there has to be a validation that gives them."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.judging import Judgement
from partool.spec.spec import Spec

_EVERY = 20
"""Validations of a run that the help proposes."""


def check_judged(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for ``checkpoint.best`` and ``training.early_stop`` without a validation that gives their figure."""
    asked: tuple[tuple[tuple[str, str], Judgement | None], ...] = (
        (("checkpoint", "best"), spec.checkpoint.best),
        (("training", "early_stop"), spec.training.early_stop),
    )
    for path, judged in asked:
        if judged is None:
            continue
        if lacking := _lacking(spec):
            message = f"{'.'.join(path)} follows validations, and {lacking[0]}"
            yield Diagnostic("PT409", message, path=path, help=lacking[1])
        elif judged.metric not in (names := figures(spec)) and not _of_a_task(spec, judged.metric):
            message = f"a validation of this training has no figure {judged.metric!r}"
            yield Diagnostic("PT410", message, path=(*path, "metric"), help=_choices(spec, names))


def _of_a_task(spec: Spec, metric: str) -> bool:
    """Return whether a figure may be TASK/METRIC. No task has a metric named loss: that is a mistyped name of a set."""
    _, slash, name = metric.rpartition("/")
    return bool(spec.evaluation.tasks and slash) and name not in ("loss", "weights_loss")


def _choices(spec: Spec, names: tuple[str, ...]) -> str:
    """Return which figures there are, in words."""
    tasks = ", or TASK/METRIC of evaluation.tasks, such as arc_easy/acc" if spec.evaluation.tasks else ""
    return f"use {', '.join(names)}{tasks}"


def figures(spec: Spec) -> tuple[str, ...]:
    """Return the figures of the spec's validations, those of named sets last."""
    ema, objective = spec.training.ema, spec.training.objective
    both = ("weights_loss",) if ema is not None and ema.validation == "both" else ()
    of_tokens = () if objective.prefers else ("perplexity",)
    of_set = ("loss", *of_tokens, *both, *objective.figures)
    named = (f"{name}/{figure}" for name in sorted(spec.data.validation_sets) for figure in of_set)
    return ("loss", *both, *objective.figures, *named)


def _lacking(spec: Spec) -> tuple[str, str] | None:
    """Return what keeps a run from validating before its end, and what to write; None if it validates."""
    every = max(1, spec.training.steps // _EVERY)
    if not spec.data.validates:
        help = f"set data.validation, such as 0.01, and training: {{validation: {{every: {every}}}}}"
        return "no data is held out for one", help
    if not spec.training.validation.every:
        return "the only one is at the end", f"set training: {{validation: {{every: {every}}}}}"
    return None

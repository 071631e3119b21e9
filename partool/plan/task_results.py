"""Results of the tasks of an evaluation, and what names the metrics of tasks in events, at trackers and in specs."""

from __future__ import annotations

from collections.abc import Mapping

from partool.plan.record import Count, Noted, Number

REQUESTS_FILE = "evaluation.requests.jsonl"
"""File beside the result with one line per request: task, document, request, log_likelihood and greedy."""


class TaskMetric(Noted):
    """A metric of a task; None stands for a number that is not finite, or that there is none of."""

    value: Number | None
    stderr: Number | None = None
    """Standard error of the mean over documents, as lm-evaluation-harness estimates it."""


class TaskResult(Noted):
    """What a task says of a model."""

    documents: Count | None = None
    """Documents of the task that were asked about; None of a group of tasks."""
    metrics: dict[str, TaskMetric] = {}


def task_figures(tasks: Mapping[str, TaskResult]) -> dict[str, float]:
    """Return the finite metrics of all tasks by TASK/METRIC."""
    return {
        f"{task}/{name}": metric.value
        for task, result in tasks.items()
        for name, metric in result.metrics.items()
        if metric.value is not None
    }


def tasks_as_text(tasks: Mapping[str, TaskResult]) -> str:
    """Return results as a sentence without an end: ``squares: acc 0.51 ± 0.02, acc_norm 0.5 ± 0.02``."""
    return "; ".join(f"{task}: {', '.join(_texts(result)) or 'no metric'}" for task, result in tasks.items())


def _texts(result: TaskResult) -> list[str]:
    texts = []
    for name, metric in result.metrics.items():
        error = "" if metric.stderr is None else f" ± {metric.stderr:.2g}"
        texts.append(f"{name} {'not finite' if metric.value is None else f'{metric.value:.4g}{error}'}")
    return texts

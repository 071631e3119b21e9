"""Tasks that judge a model while it is trained, with each n-th of its validations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from partool.plan.task_results import task_figures, tasks_as_text
from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.tasks import TaskRunner
from partool_runtime.mesh import Ranks
from partool_runtime.optim.types import Optimizer
from partool_runtime.parallel.scoring import Scoring
from partool_runtime.pulse import Pulse
from partool_runtime.telemetry import Recorder


def tasks_due(plan: Plan, steps_done: int) -> bool:
    """Return whether tasks run with the validation after ``steps_done`` steps: each n-th does, and the last one."""
    if not plan.evaluation.tasks:
        return False
    between = plan.training.validation.every * plan.evaluation.every
    return steps_done == plan.training.steps or (between > 0 and steps_done % between == 0)


class TrainingTasks:
    """The tasks of a training. A failure after the first step switches them off, and the training goes on."""

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        ranks: Ranks,
        *,
        scoring: Scoring | None,
        recorder: Recorder,
        pulse: Pulse,
    ) -> None:
        """Start to load the tasks, if the plan has any."""
        self._plan, self._recorder, self._ranks = plan, recorder, ranks
        self._runner = TaskRunner(plan, run_dir, ranks, scoring, pulse) if plan.evaluation.tasks else None

    def begin(self, stopping: Callable[[], bool]) -> None:
        """Wait until the tasks are loaded, or a stop is requested; a collective.

        Raises ConfigurationError on all ranks if they cannot be loaded.
        """
        if self._runner is not None:
            self._runner.wait(stopping)

    def figures(
        self, steps_done: int, optimizer: Optimizer, stopping: Callable[[], bool], *, averaged: bool
    ) -> dict[str, float] | None:
        """Run the tasks if they are due; return on rank 0 their metrics by TASK/METRIC. A collective.

        ``averaged`` judges the average of the weights. None on all ranks once ``stopping``, on which ranks agree,
        returns True.
        """
        if self._runner is None or not tasks_due(self._plan, steps_done):
            return {}
        average = optimizer.average if averaged else None
        try:
            with nullcontext() if average is None else average.in_place():
                results = self._runner.evaluate(steps_done, stopping)
        except ConfigurationError as error:
            if self._ranks.rank == 0:
                self._recorder.warning(f"{error.code}: {error.message}; the training goes on without tasks")
            self.close()
            return {}
        if not results:
            return None if results is None else {}
        figures = task_figures(results)
        self._recorder.event("evaluation", step=steps_done, tasks=figures)
        print(f"tasks after step {steps_done}: {tasks_as_text(results)}")
        self._check(figures)
        return figures

    def close(self) -> None:
        """End the process of the tasks; later validations run without them."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _check(self, figures: dict[str, float]) -> None:
        """Warn of a figure that decides what is kept, or when the run ends, and that no task gives."""
        judged, sets = (self._plan.checkpoint.best, self._plan.training.early_stop), self._plan.data.validation_sets
        of_names = {each.metric for each in judged if each is not None and "/" in each.metric}
        of_tasks = {metric for metric in of_names if metric.rpartition("/")[0] not in sets}
        for metric in sorted(of_tasks - figures.keys()):
            self._recorder.warning(f"PT429: no task gives {metric}; there are {', '.join(figures) or 'none'}")

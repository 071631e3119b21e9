"""Rules about the tasks of an evaluation that need only the spec."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.spec import Spec
from partool.strategies.jobs import JOBS
from partool.strategies.schedules import MOVING_WEIGHTS

_PATH = ("evaluation",)


def check_evaluation(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for settings without tasks, and for tasks that nothing runs."""
    evaluation, schedule = spec.evaluation, spec.parallel.pipeline.schedule
    if not evaluation.tasks:
        for name in sorted(evaluation.model_fields_set - {"tasks"}):
            message = f"evaluation.{name} has no meaning without tasks"
            help = "add evaluation: {tasks: [...]}, or drop it"
            yield Diagnostic("PT411", message, path=(*_PATH, name), help=help)
        return
    repeated = sorted({task for task in evaluation.tasks if evaluation.tasks.count(task) > 1})
    if repeated:
        message = f"{', '.join(repeated)} is among the tasks more than once"
        yield Diagnostic("PT415", message, path=(*_PATH, "tasks"), help="name each task once")
    if JOBS[spec.job].backward and not spec.data.validates:
        message = "tasks run with the validations of a training, and no data is held out for one"
        help = "set data.validation, such as 0.01, or judge the trained model: partool eval RUN --tasks ..."
        yield Diagnostic("PT414", message, path=_PATH, help=help)
    if schedule in MOVING_WEIGHTS:
        message = f"tasks do not run with schedule: {schedule}, where the loss moves from rank to rank"
        help = "use schedule: 1f1b, or judge the trained model: partool eval RUN --tasks ..."
        yield Diagnostic("PT416", message, path=_PATH, help=help)
    early = spec.training.early_stop
    if early is not None and "/" in early.metric and evaluation.every > 1:
        message = f"early_stop counts validations by {early.metric}, which only each {evaluation.every}th of them gives"
        yield Diagnostic("PT417", message, path=(*_PATH, "every"), help="use every: 1, or another metric")

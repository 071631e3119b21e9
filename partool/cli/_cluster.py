"""The part of ``partool launch`` that submits runs to a cluster."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from partool.cli._fail import fail
from partool.cli._job import Order, order, show_levels
from partool.cli._local import BY_HAND, check_step, goes_on, set_aside
from partool.cli._runs import reaching, show_lines
from partool.launch.checkpoints import checkpoint_folder, complete
from partool.launch.describe import as_text, display
from partool.launch.store import Run, RunStore
from partool.launch.submit import alone, submit_again, submit_new, under_way
from partool.launch.target import ClusterTarget, LaunchError, LogQuery, NoLogsError
from partool.launch.targets import cluster, statuses, target_of
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.render.job import Job
from partool.strategies.targets import TARGETS

_EXIT_FINDINGS = 1
_EXIT_ENVIRONMENT = 3
_EXIT_JOB_FAILED = 5
_EXIT_DIFFERENT = 10
_EXIT_STOPPED = 75
_POLL_S = 0.5
_PASSED_THROUGH = (0, 75, 78)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of ``partool launch`` that apply to clusters."""

    dry_run: bool = False
    diff: bool = False
    follow: bool = False
    again: bool = False
    array: tuple[str, ...] = ()
    at_once: int | None = None
    step: int | None = None
    crds: Path | None = None


def launch(path: Path, plan: Plan, overrides: list[str], previous: Run | None, options: ClusterOptions) -> None:
    """Submit a plan, or resubmit the run ``previous``; ends the command with an exit code for the outcome."""
    ordered = order(path, plan, overrides, list(options.array), at_once=options.at_once, previous=previous)
    target = cluster(plan.launch.target)
    try:
        if options.diff:
            _diff(target, ordered)
        elif options.dry_run:
            _dry_run(target, ordered, options.crds)
        else:
            before = 0 if previous is None else previous.status().attempt
            with nullcontext() if previous is None else alone(previous):
                run = _submit(target, ordered, previous, options)
            if options.follow:
                _follow(run, before)
    except LaunchError as error:
        fail(error.code, error.message, error.help, error.exit_code)
    except OSError as error:
        where = "PARTOOL_HOME says where runs are kept"
        fail("PT512", f"the run's folder cannot be written: {error}", where, _EXIT_ENVIRONMENT)


def _submit(target: ClusterTarget, ordered: Order, previous: Run | None, options: ClusterOptions) -> Run:
    job = ordered.job
    if not show_levels(target.validate(job, ordered.rendered, crds=options.crds, offline=True), brief=True):
        raise typer.Exit(_EXIT_FINDINGS)
    target.check(job.plan)
    if previous is not None:
        _check_ended(previous)
        if options.step is not None:
            _step(previous, job.plan, options.step)
        says = _goes_on(previous, job)
        submit_again(target, previous, job, ordered.rendered, ordered.spec_text)
        say(f"partool: {says}", err=True)
        run = previous
    else:
        going = None if options.again else under_way(RunStore(), job.plan, ordered.plan_hash)
        if going is not None:
            message = f"this very plan is under way: {going[0].id} ({going[1].state})"
            fail("PT585", message, f"partool status {going[0].id}; or launch --again to run it twice", 4)
        run = submit_new(target, job, ordered.rendered, ordered.spec_text)
    submission = run.submission()
    details = submission.details if submission else {}
    what = f"job {details['job_id']}" if "job_id" in details else details.get("kind", "job")
    say(f"partool: run {run.id} in {display(run.path)}, {job.plan.launch.target} {what}", err=True)
    if not options.follow:
        say(f"partool: partool status {run.id}, logs -f {run.id}, cancel {run.id}", err=True)
    return run


def _goes_on(run: Run, job: Job) -> str:
    """Return from where a run that is submitted again goes on, and what its new plan changes."""
    seen = TARGETS[job.plan.launch.target].sees_files and not job.tasks
    step = max(complete(checkpoint_folder(run, job.plan)), default=0) if seen else None
    try:
        older = Plan.from_json(run.plan_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of another version
        older = None
    return goes_on(older, job.plan, step)


def _step(run: Run, plan: Plan, step: int) -> None:
    if not TARGETS[plan.launch.target].sees_files:
        message = "a Kubernetes run's checkpoints are in its storage and cannot be renamed from here"
        fail("PT589", message, BY_HAND, 1)
    check_step(run, plan, step)
    set_aside(run, plan, step)


def _check_ended(run: Run) -> None:
    status = statuses([run])[run.id]
    if status.active:
        fail("PT504", f"{run.id} is {status.state}", f"partool cancel {run.id}", 4)


def _dry_run(target: ClusterTarget, ordered: Order, crds: Path | None) -> None:
    say(ordered.rendered.text, nl=False)
    levels = target.validate(ordered.job, ordered.rendered, crds=crds)
    if not show_levels(levels):
        raise typer.Exit(_EXIT_FINDINGS)
    if not levels[-1].ran:  # whether the scheduler accepts the job is the purpose of a dry run
        raise typer.Exit(_EXIT_ENVIRONMENT)


def _diff(target: ClusterTarget, ordered: Order) -> None:
    text = target.diff(ordered.job, ordered.rendered)
    say(text, nl=False)
    if text:
        raise typer.Exit(_EXIT_DIFFERENT)
    say("partool: no difference", err=True)


def _follow(run: Run, before: int) -> None:
    """Print the logs of attempts later than number ``before`` until the run ends.

    Ctrl-C ends only the printing, not the run.
    """
    target = target_of(run)
    try:
        while before and (status := target.status(run)).active and status.attempt == before:
            time.sleep(_POLL_S)
        with reaching(run), suppress(NoLogsError):
            show_lines(run, target.logs(run, LogQuery(follow=True)), None)
    except KeyboardInterrupt:
        say(f"\npartool: {run.id} goes on; partool cancel {run.id} stops it", err=True)
        raise typer.Exit(0) from None
    status = target.status(run)
    say(as_text(run, status), err=True)
    code = status.exit_code
    if status.state == "done":
        raise typer.Exit(0)
    if status.state == "cancelled":  # taken from the queue, or stopped after a checkpoint
        raise typer.Exit(_EXIT_STOPPED)
    raise typer.Exit(code if code in _PASSED_THROUGH and code else _EXIT_JOB_FAILED)

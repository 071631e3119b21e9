"""Makes the job for a target from a spec or a plan, for ``render`` and ``launch``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from partool.catalog.transformers_process import code_allowed
from partool.cli._fail import fail
from partool.cli._foreign import is_plan
from partool.cli._load import load_plan_or_exit, show, varied
from partool.diagnostics.record import Diagnostic
from partool.launch.prepare import about_launch, aimed_at, sizes_of
from partool.launch.store import Run, RunStore
from partool.launch.submit import hash_of, job_of, tasks_of
from partool.launch.target import Level
from partool.plan.outline import other_version
from partool.plan.run import PLAN_FILE
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.render.job import EngineProgram, Job, Rendered
from partool.render.render import findings, render
from partool.strategies.targets import ARRAYS


@dataclass(frozen=True, slots=True)
class Order:
    """A job for a cluster, its rendered files, and the text of its spec."""

    job: Job
    rendered: Rendered
    spec_text: str | None
    """Text of the spec; None if the user gave a plan file instead."""
    plan_hash: str
    """Hash over all plans of the job."""


def aimed(overrides: Sequence[str], target: str | None, path: Path) -> list[str]:
    """Return the overrides, with ``target`` added if ``path`` is a spec; :func:`plan_for` sets a plan file's target."""
    goes = [f"launch.target={target}"] if target and not is_plan(path) else []
    return [*overrides, *goes]


def plan_for(path: Path, overrides: list[str], target: str | None, *, strict: bool) -> Plan:
    """Return the plan for a target, made from a spec or read from a plan file; ends the command if there are errors."""
    plan = load_plan_or_exit(path, aimed(overrides, target, path), "text", strict)
    if is_plan(path):
        plan = aimed_at(plan, target)
    if plan.code and not code_allowed():
        message = f"{path} builds its model with code from {plan.code}, which runs only if you allow it"
        fail("PT590", message, "read that code; if you trust it, give --trust-remote-code on the command line", 1)
    shown = set() if is_plan(path) else {(finding.code, finding.message) for finding in plan.findings}
    stop_on([each for each in about_launch(plan) if (each.code, each.message) not in shown], strict=strict)
    return plan


def order(
    path: Path,
    plan: Plan,
    overrides: list[str],
    array: list[str],
    *,
    at_once: int | None,
    previous: Run | None = None,
    program: EngineProgram | None = None,
) -> Order:
    """Return the rendered job that runs ``plan``, or an array of plans, on a cluster; ends the command on errors."""
    if previous:
        _refuse_older(previous)
    tasks = tasks_of(previous) if previous else ()
    if tasks and previous is not None:
        _as_before(path, previous, array)
    elif array:
        tasks = _tasks(path, aimed(overrides, plan.launch.target, path), array, plan)
    if at_once is not None and not tasks:
        raise typer.BadParameter("--at-once goes only together with --array")
    sizes = sizes_of(plan)
    plan_hash = hash_of(plan, tasks, sizes)
    run = previous or RunStore().next_submitted(plan.name, plan_hash)
    job = replace(job_of(plan, run, tasks, sizes, at_once), program=program)
    stop_on(findings(plan.launch.target, job), strict=False)
    text = None if is_plan(path) else path.read_text(encoding="utf-8")
    return Order(job, render(plan.launch.target, job), text, plan_hash)


def stop_on(findings: Sequence[Diagnostic], *, strict: bool) -> None:
    """Show findings; end the command if one is an error or, with ``strict``, a warning."""
    failed = any(finding.severity == "error" or strict for finding in findings if finding.severity != "note")
    show(list(findings), {}, "text", failed=failed)
    if failed:
        raise typer.Exit(1)


def show_levels(levels: Sequence[Level], *, brief: bool = False) -> bool:
    """Print the result and findings of each validation step (``levels``); returns True if no finding is an error."""
    if brief and not any(level.findings for level in levels):
        ran = ", ".join(level.name for level in levels if level.ran)
        others = ", ".join(level.name for level in levels if not level.ran)
        say(f"partool: checked by {ran}" + (f"; not by {others}" if others else ""), err=True)
        return True
    sound = True
    for level in levels:
        errors = [finding for finding in level.findings if finding.severity == "error"]
        verdict = "not run" if not level.ran else f"{len(errors)} error(s)" if errors else "passed"
        say(f"partool: {level.name}: {verdict}" + (f" ({level.note})" if level.note else ""), err=True)
        show(list(level.findings), {}, "text", failed=bool(errors))
        sound = sound and not errors
    return sound


def require_runnable(plan: Plan) -> None:
    """End the command with PT505 if the runtime cannot run a plan."""
    if not plan.runnable:
        codes = " ".join(plan.not_runnable)
        fail("PT505", f"the runtime cannot run this plan yet ({codes})", f"partool explain {codes}", 1)


def _tasks(path: Path, overrides: list[str], array: list[str], plan: Plan) -> tuple[Plan, ...]:
    """Return one plan per task of an array: one for each combination of the values in ``array``.

    The command ends if the plans do not request the same machines in the same way.
    """
    if is_plan(path):
        raise typer.BadParameter("--array varies a spec, not a plan")
    if plan.launch.target not in ARRAYS:
        help = f"use --target {' or '.join(ARRAYS)}, or launch each"
        fail("PT587", f"the target {plan.launch.target} has no job arrays", help, 1)
    plans = []
    for row, task, problem in varied(path, overrides, array):
        what = ", ".join(row)
        if task is None:
            fail("PT587", f"there is no plan for the task with {what}: {problem}", "", 1)
        if not task.runnable:
            fail("PT505", f"the runtime cannot run the task with {what}", f"partool explain {task.not_runnable[0]}", 1)
        same = task.devices.nodes == plan.devices.nodes and task.devices.per_node == plan.devices.per_node
        # Each task may have its own time for a checkpoint, which follows from its steps: the job gives the longest.
        like = plan.launch.model_copy(update={"shutdown_timeout_s": task.launch.shutdown_timeout_s})
        if not same or task.launch != like:
            message = f"the task with {what} asks for other machines, or launches in another way, than the rest"
            fail("PT587", message, "an array's tasks differ in model, data, training and layout only", 1)
        plans.append(task)
    return tuple(plans)


def _refuse_older(previous: Run) -> None:
    """End the command if the stored plans of ``previous`` have an older plan version."""
    refusal = next(filter(None, map(other_version, sorted(previous.path.glob(f"task-*/{PLAN_FILE}")))), None)
    if refusal is not None:
        help = "an array's tasks resume with their old plans: launch its spec with --array again instead"
        fail("PT503", refusal[0], help, 1)


def _as_before(path: Path, previous: Run, array: list[str]) -> None:
    """End the command if the user tries to change an array's values while resuming ``previous``."""
    if array or path != previous.plan_file:
        message = f"{previous.id} is an array, and its tasks resume with the plans they have"
        fail("PT587", message, f"partool launch --resume {previous.id}", 1)

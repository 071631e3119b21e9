"""``partool launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partool.cli._load import load_plan_or_exit
from partool.cli._runs import fail, find_run_or_exit
from partool.launch.checkpoints import checkpoint_folder, complete, set_aside_after
from partool.launch.describe import display, last_step
from partool.launch.local import LocalTarget
from partool.launch.store import Run, RunStore
from partool.launch.target import LaunchError
from partool.plan.types import Plan

_EXIT_JOB_FAILED = 5
_ENVIRONMENT = 3
_REFUSED = 78
_PASSED_THROUGH = (0, 75, 78)


def command(
    spec: Annotated[Path, typer.Argument(help="Spec (YAML), plan (JSON); with --resume also just a run.")],
    run: Annotated[
        str | None, typer.Argument(help="With --resume: which run. Default: the newest of that name.")
    ] = None,
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from a run's last checkpoint, in its folder.")
    ] = False,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=0, help="With --resume: from the checkpoint of this step; later ones are kept aside."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it runs; see status, logs and cancel.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
) -> None:
    """Plan a spec and train it on this machine."""
    if run is not None and not resume:
        raise typer.BadParameter("a run is named only together with --resume")
    if step is not None and not resume:
        raise typer.BadParameter("--step goes only together with --resume")
    previous = _previous_run(spec, run) if resume else None
    plan, spec_text = _plan(spec, previous, overrides or [], strict)
    if not plan.runnable:
        codes = " ".join(plan.not_runnable)
        fail("PT505", f"the runtime cannot run this plan yet ({codes})", f"partool explain {codes}", 1)
    if resume and previous is None:
        previous = _newest(plan.name)
    if previous is not None and previous.status().active:
        fail("PT504", f"{previous.id} is running", f"partool cancel {previous.id}", 4)
    if previous is not None and step is not None:
        _check_step(previous, plan, step)
    if dry_run:
        typer.echo(LocalTarget().describe(plan, previous, resume=resume, step=step))
        return
    current, code = _start(plan, spec_text, previous, resume=resume, step=step, detach=detach)
    if code == 0:
        typer.echo(
            f"partool: done; plan, log and checkpoints are in {display(current.path)}\n"
            f"partool: weights for other tools: partool export {current.id} --out FOLDER",
            err=True,
        )
    if code == 75:
        typer.echo(f"partool: to go on: partool launch --resume {current.id}", err=True)
    raise typer.Exit(code if code in _PASSED_THROUGH else 0 if code is None else _EXIT_JOB_FAILED)


def _start(
    plan: Plan, spec_text: str | None, previous: Run | None, *, resume: bool, step: int | None, detach: bool
) -> tuple[Run, int | None]:
    """Start the run, or go on with ``previous``; returns it with the agent's exit code, None if it is detached."""
    target, current = LocalTarget(), None
    try:
        target.check()
        current = previous or RunStore().create(plan.name)
        replaced = current.write_plan(plan, spec_text)
        if step is not None:
            for path in set_aside_after(checkpoint_folder(current, plan), step):
                typer.echo(f"partool: kept aside: {display(path)}", err=True)
        typer.echo(f"partool: run {current.id} in {display(current.path)}", err=True)
        before = last_step(current)
        code = target.launch(current, plan, resume=resume, detach=detach)
        if code == _REFUSED and replaced and last_step(current) == before:  # not one step with the new plan
            current.take_back(replaced)
            typer.echo(f"partool: {current.id} keeps the plan it had", err=True)
        return current, code
    except LaunchError as error:
        if current is not None:
            current.give_up(error.message)
        fail(error.code, error.message, error.help, error.exit_code)
    except OSError as error:
        where = "PARTOOL_HOME says where runs are kept"
        fail("PT512", f"the run's folder cannot be written: {error}", where, _ENVIRONMENT)


def _previous_run(spec: Path, query: str | None) -> Run | None:
    """Return the run to resume where the command line names one: as second argument, or as the only one."""
    if query is not None:
        return find_run_or_exit(query)
    return None if spec.is_file() else find_run_or_exit(str(spec))


def _check_step(run: Run, plan: Plan, step: int) -> None:
    folder = checkpoint_folder(run, plan)
    steps = list(complete(folder))
    if step not in steps:
        there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there are none"
        fail("PT509", f"no checkpoint of step {step} in {display(folder)}", there, 1)


def _newest(name: str) -> Run:
    runs = [run for run in RunStore().runs() if run.name == name]
    if not runs:
        fail("PT502", f"there is no run of {name!r} to resume", "launch it without --resume", 1)
    return runs[0]


def _plan(spec: Path, previous: Run | None, overrides: list[str], strict: bool) -> tuple[Plan, str | None]:
    """Return the plan to run, with the spec's text where a spec was given."""
    path = spec if spec.is_file() or previous is None else previous.plan_file
    plan = load_plan_or_exit(path, overrides, "text", strict)
    return plan, None if path.suffix == ".json" else path.read_text(encoding="utf-8")

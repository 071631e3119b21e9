"""What ``partool eval`` judges: a run, a checkpoint or a folder of transformers', and the plan that does it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from partool.catalog.transformers_process import code_allowed
from partool.cli._fail import fail
from partool.cli._job import require_runnable
from partool.cli._load import read_plan_or_exit, show
from partool.cli._local import best_step_or_exit, check_step
from partool.cli._runs import find_run_or_exit, is_run
from partool.diagnostics.record import Diagnostic
from partool.launch.checkpoints import checkpoint_folder, complete
from partool.launch.describe import display
from partool.launch.evaluating import TasksOption, base_dir_of, spec_of_folder, spec_of_run
from partool.launch.store import Run, RunStore
from partool.plan.run import PLAN_FILE
from partool.plan.types import Plan
from partool.planner.loaded import plan_loaded
from partool.spec.loader import load_text
from partool.strategies.jobs import JOBS

_STEP = re.compile(r"step-(\d{8,})")
_NAME = "eval.yaml"


@dataclass(frozen=True, slots=True)
class Judged:
    """The plan of an evaluation, and the spec that partool wrote for it."""

    plan: Plan
    spec_text: str


def judged_or_exit(
    target: str, tasks: TasksOption, overrides: list[str], *, step: int | None = None, best: bool = False
) -> Judged:
    """Return the plan that evaluates what the user names; ends the command with a finding if there is none."""
    folder = Path(target)
    if (folder / "config.json").is_file() and not is_run(target):
        if best or step is not None:
            raise typer.BadParameter("--best and --step are for runs: a folder of transformers' has one model")
        return _of_folder(folder, tasks, overrides)
    if match := _STEP.fullmatch(folder.name):
        if best or step is not None:
            raise typer.BadParameter("--best and --step are for runs: the folder is of one step already")
        run, step = _run_of_checkpoint(folder), int(match[1])
    else:
        run = find_run_or_exit(target)
    plan = read_plan_or_exit(run.plan_file)
    if not JOBS[plan.job].backward:
        message = f"{run.id} is an evaluation, which has no weights"
        fail("PT428", message, "evaluate the run that trained them", 1)
    if plan.adapter is not None:
        message = f"{run.id} trains an adapter, and an evaluation reads whole models"
        fail("PT428", message, f"partool export {run.id} --merge --out FOLDER, then partool eval FOLDER", 1)
    spec = spec_of_run(plan, _checkpoint(run, plan, step, best=best), tasks)
    return _planned([spec], base_dir_of(plan), overrides)


def _of_folder(folder: Path, tasks: TasksOption, overrides: list[str]) -> Judged:
    if not tasks.tasks and not any(each.startswith("data") for each in overrides):
        message = (
            "a folder of transformers' has no data: give --tasks, or --set data.source=FILES for the loss over them"
        )
        raise typer.BadParameter(message)
    specs = [spec_of_folder(folder, tasks, by_transformers=by) for by in (False, True)]
    return _planned(specs, Path.cwd(), overrides)


def _run_of_checkpoint(folder: Path) -> Run:
    """Return the run that wrote a checkpoint: the folder above has its plan, or its id."""
    above = folder.absolute().parent
    if (above.parent / PLAN_FILE).is_file():
        return Run(above.parent)
    run = Run(RunStore().root / above.name)
    if not run.plan_file.is_file():
        message = f"no run is known whose checkpoint {display(folder.absolute())} is"
        fail("PT428", message, "a checkpoint lies in checkpoints/ of its run, or in a folder named by the run's id", 1)
    return run


def _checkpoint(run: Run, plan: Plan, step: int | None, *, best: bool) -> Path:
    folder = checkpoint_folder(run, plan)
    if step is not None:
        check_step(run, plan, step)
    steps = complete(folder)
    if not steps:
        message = f"{run.id} has no complete checkpoint in {display(folder)}"
        fail("PT428", message, "wait for its first one, or name another run: partool list", 1)
    chosen = best_step_or_exit(run, plan) if best else max(steps) if step is None else step
    return steps[chosen]


def _planned(specs: list[dict[str, Any]], base_dir: Path, overrides: list[str]) -> Judged:
    """Return the plan of the first spec that has one; ends the command with the findings of the last spec if none has.

    A model that partool's own decoder does not know has a second spec, by which transformers builds it.
    """
    plan: Plan | None = None
    findings: list[Diagnostic] = []
    for spec in specs:
        text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True)
        loaded = load_text(text, _NAME, overrides)
        plan, findings = plan_loaded(loaded, base_dir / _NAME)
        if plan is not None:
            break
    show(findings, dict(loaded.source.texts), "text", failed=plan is None)
    if plan is None:
        raise typer.Exit(1)
    require_runnable(plan)
    if plan.code and not code_allowed():
        message = f"the model is built with code from {plan.code}, which runs only if you allow it"
        fail("PT590", message, "read that code; if you trust it, give --trust-remote-code on the command line", 1)
    return Judged(plan, text)

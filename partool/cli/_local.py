"""The part of ``partool launch`` that starts runs on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from partool.cli._fail import fail
from partool.launch.checkpoints import best_step, checkpoint_folder, complete, set_aside_after
from partool.launch.describe import display, last_step
from partool.launch.local.target import LocalTarget, stops_held_back
from partool.launch.store import Run, RunStore
from partool.launch.target import LaunchError
from partool.plan.learning_rate import rate_changes
from partool.plan.record import DamagedRecordError
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.strategies.jobs import JOBS
from partool.strategies.targets import TARGETS

_EXIT_JOB_FAILED = 5
_ENVIRONMENT = 3
_REFUSED = 78
_PASSED_THROUGH = (0, 75, 78)
BY_HAND = "rename the later ones there by hand, then resume without --step"


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of ``partool launch`` that apply to this machine."""

    resume: bool = False
    step: int | None = None
    dry_run: bool = False
    detach: bool = False


def launch(plan: Plan, spec_text: str | None, previous: Run | None, options: LocalOptions) -> None:
    """Run a plan on this machine, or resume ``previous``; ends the command with an exit code for the outcome."""
    if previous is not None and previous.status().active:
        fail("PT504", f"{previous.id} is running", f"partool cancel {previous.id}", 4)
    if previous is not None and options.step is not None:
        check_step(previous, plan, options.step)
    if options.dry_run:
        say(LocalTarget().describe(plan, previous, resume=options.resume, step=options.step))
        if reason := LocalTarget().missing(plan):
            say(f"partool: launch would refuse this here: {reason}", err=True)
        return
    current, code = _start(plan, spec_text, previous, options)
    if code == 0:
        trained = JOBS[plan.job].backward
        say(
            f"partool: done; plan, log and {'checkpoints' if trained else 'loss'} are in {display(current.path)}",
            err=True,
        )
        if trained:
            say(f"partool: weights for other tools: partool export {current.id} --out FOLDER", err=True)
    if code == 75:
        say(f"partool: to go on: partool launch --resume {current.id}", err=True)
    raise typer.Exit(code if code in _PASSED_THROUGH else 0 if code is None else _EXIT_JOB_FAILED)


def check_step(run: Run, plan: Plan, step: int) -> None:
    """End the command with PT509 if the run has no complete checkpoint of step number ``step``."""
    folder = checkpoint_folder(run, plan)
    steps = list(complete(folder))
    if step not in steps:
        choices = f"there are those of steps {', '.join(map(str, steps))}" if steps else "there are none"
        fail("PT509", f"no checkpoint of step {step} in {display(folder)}", choices, 1)


def best_step_or_exit(run: Run, plan: Plan) -> int:
    """Return the step of the run's best checkpoint; ends the command with PT626 if it is not known."""
    folder = checkpoint_folder(run, plan)
    if not TARGETS[plan.launch.target].sees_files:
        fail("PT589", "a Kubernetes run's checkpoints are in its storage and cannot be read from here", BY_HAND, 1)
    try:
        step = best_step(folder, plan)
    except DamagedRecordError as error:
        fail("PT626", str(error), "name a checkpoint with --step", 1)
    if step is None:
        message = f"no validation of a checkpoint in {display(folder)} is recorded"
        fail("PT626", message, "checkpoint: {best: loss} keeps the best, and the record", 1)
    return step


def set_aside(run: Run, plan: Plan, step: int) -> None:
    """Rename the checkpoints of steps later than ``step``, so that a resumed run ignores them; print the new names."""
    for path in set_aside_after(checkpoint_folder(run, plan), step):
        say(f"partool: kept aside: {display(path)}", err=True)


def _start(plan: Plan, spec_text: str | None, previous: Run | None, options: LocalOptions) -> tuple[Run, int | None]:
    """Start a run, or resume ``previous``; return the run and the agent's exit code (None if the run is detached)."""
    target, current = LocalTarget(), None
    try:
        target.check(plan)
        with stops_held_back() as stops:
            current = previous or RunStore().create(plan.name)
            replaced = current.write_plan(plan, spec_text)
            if options.step is not None:
                set_aside(current, plan, options.step)
            say(f"partool: run {current.id} in {display(current.path)}", err=True)
            if options.resume and previous is not None:
                saved = max(complete(checkpoint_folder(current, plan)), default=0)
                older = _older_plan(replaced, current.plan_file)
                say(f"partool: {goes_on(older, plan, saved)}", err=True)
            before = last_step(current)
            code = target.launch(current, plan, stops, resume=options.resume, detach=options.detach)
            if code == _REFUSED and replaced and last_step(current) == before:  # no step was made with the new plan
                current.take_back(replaced)
                say(f"partool: {current.id} keeps the plan it had", err=True)
        return current, code
    except LaunchError as error:
        if current is not None:
            current.give_up(error.message)
        fail(error.code, error.message, error.help, error.exit_code)
    except OSError as error:
        where = "PARTOOL_HOME says where runs are kept"
        fail("PT512", f"the run's folder cannot be written: {error}", where, _ENVIRONMENT)


def _older_plan(replaced: dict[Path, Path], file: Path) -> Plan | None:
    """Return the plan that a run had before; None if it is the same, or of another version."""
    try:
        return Plan.from_json(replaced[file].read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):
        return None


def goes_on(older: Plan | None, plan: Plan, step: int | None) -> str:
    """Return a sentence that names the step from which a resumed run continues, and what changes in its training.

    ``older`` is the run's plan before; ``step`` is 0 without a checkpoint, and None if it cannot be seen from here.
    """
    where = f"goes on from step {step}" if step else "there is no checkpoint, so it begins anew"
    where = "goes on from its last checkpoint, if it has one" if step is None else where
    if older is None:
        return where
    changes = layout_changes(older, plan)
    layout = f"the layout changes: {', '.join(changes)}" if changes else ""
    return "; ".join(
        filter(
            None, (where, layout, "" if step == 0 or not JOBS[plan.job].backward else rate_changes(older, plan, step))
        )
    )


def layout_changes(old: Plan, new: Plan) -> list[str]:
    """Return the differences in layout between two plans, in words: ``schedule 1f1b -> hanayo``, ``pp 2 -> 4``."""

    def facts(plan: Plan) -> dict[str, object]:
        layout, mesh = plan.layout, plan.layout.mesh
        schedule = layout.pipeline.schedule if mesh.pp > 1 else "none"
        sizes = {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp, "zero": layout.data.zero}
        sizes |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
        batches = {"micro_batch": layout.micro_batch, "micro-batches": layout.derived.accumulation}
        return {
            "schedule": schedule,
            "stages": len(layout.pipeline.bounds),
            **sizes,
            **batches,
            "compile": layout.compile,
        }

    before, after = facts(old), facts(new)
    changes = [f"{name} {before[name]} -> {value}" for name, value in after.items() if before[name] != value]
    hashes = (old.layout.derived.schedule_hash, new.layout.derived.schedule_hash)
    return changes or (["other lists of the schedule"] if hashes[0] != hashes[1] else [])

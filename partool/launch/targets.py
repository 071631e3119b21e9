"""Finds targets by name: a target is ``TARGET`` of ``partool.launch.<name>.target``, imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from partool.launch.doctor import checks as of_this_machine
from partool.launch.store import Run
from partool.launch.target import Check, ClusterTarget, DoctorFiles, LaunchError, Target
from partool.plan.record import DamagedRecordError, damage
from partool.plan.run import RunStatus
from partool.plan.types import Plan
from partool.strategies.targets import HERE, SCHEDULERS


def target_of(run: Run) -> Target:
    """Return the target of a run; raises ``pydantic.ValidationError`` if the run's record is corrupt."""
    submission = run.submission()
    return cast(Target, _load(HERE if submission is None else submission.target))


def cluster(name: str) -> ClusterTarget:
    """Return the target ``name``, which has a scheduler."""
    return cast(ClusterTarget, _load(name))


def doctor(name: str, plan: Plan | None, files: DoctorFiles) -> Iterator[Check]:
    """Yield the checks of the target's module ``doctor`` if the target has a scheduler, else checks of this machine."""
    if name not in SCHEDULERS:
        yield from of_this_machine(plan)
        return
    checks: Callable[[Plan | None, DoctorFiles], Iterator[Check]]
    checks = importlib.import_module(f"partool.launch.{name}.doctor").checks
    yield from checks(plan, files)


def _load(name: str) -> object:
    return importlib.import_module(f"partool.launch.{name}.target").TARGET()


def statuses(runs: Sequence[Run]) -> dict[str, RunStatus]:
    """Return the status of each run, by run id; asks a cluster once. If a cluster fails, its runs are ``unknown``."""
    by_run: dict[str, RunStatus] = {}
    by_target: dict[str, list[Run]] = {}
    for run in runs:
        try:
            submission = run.submission()
        except ValueError as error:
            reason = f"no readable submission.json: {damage(error)}"
            by_run[run.id] = run.status().model_copy(update={"reason": reason})
            continue
        by_target.setdefault(HERE if submission is None else submission.target, []).append(run)
    for name, some in by_target.items():
        by_run |= _statuses(name, some)
    return by_run


def _statuses(name: str, runs: list[Run]) -> dict[str, RunStatus]:
    if name == HERE:
        return {run.id: run.status() for run in runs}
    # a run that failed or was preempted may have been requeued, so the cluster is asked about it
    ended = {run.id: status for run in runs if (status := run.status()).state in ("done", "cancelled")}
    open_runs = [run for run in runs if run.id not in ended]
    if not open_runs:
        return ended
    try:
        return ended | cluster(name).statuses(open_runs)
    except LaunchError as error:
        return ended | {run.id: _unknown(run, error.message) for run in open_runs}
    except DamagedRecordError as error:
        if len(open_runs) == 1:
            return ended | {open_runs[0].id: _unknown(open_runs[0], str(error))}
        for run in open_runs:  # one by one: the others can be asked about
            ended |= _statuses(name, [run])
        return ended


def _unknown(run: Run, reason: str) -> RunStatus:
    return run.status().model_copy(update={"state": "unknown", "reason": reason})

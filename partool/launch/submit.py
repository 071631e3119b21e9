"""Submits a run to a scheduler, and undoes everything if the submission fails."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from partool.launch.store import SUBMISSION_FILE, Run, RunStore, Submission
from partool.launch.target import ClusterTarget, LaunchError
from partool.launch.targets import statuses
from partool.plan import posix
from partool.plan.run import (
    CANCEL_FILE,
    FAILURES_FILE,
    PLAN_FILE,
    PREEMPTIONS_FILE,
    SPEC_FILE,
    STATUS_FILE,
    RunStatus,
    read_status,
    write_status,
)
from partool.plan.types import Plan
from partool.render.job import LOG_FOLDER, Job, Rendered

_LOCK_FILE = "submit.lock"
_MARKS = (CANCEL_FILE, PREEMPTIONS_FILE, FAILURES_FILE)


def hash_of(plan: Plan, tasks: tuple[Plan, ...] = (), sizes: dict[int, Plan] | None = None) -> str:
    """Return a hash of all plans of a job; for a single plan, the plan's hash."""
    others = [*tasks, *(sizes or {}).values()]
    if not others:
        return plan.hash
    return hashlib.sha256("".join(each.hash for each in (plan, *others)).encode()).hexdigest()


def job_of(plan: Plan, run: Run, tasks: tuple[Plan, ...], sizes: dict[int, Plan], at_once: int | None) -> Job:
    """Return the job that runs ``plan`` in the folder of ``run`` and under its id."""
    return Job(plan, run.id, PurePosixPath(run.path), tasks=tasks, at_once=at_once, sizes=sizes)


def tasks_of(run: Run) -> tuple[Plan, ...]:
    """Return the plans of an array's tasks, in order; empty for a run that is not an array."""
    files = run.path.glob(f"task-*/{PLAN_FILE}")
    ordered = sorted(files, key=lambda file: int(file.parent.name.rpartition("-")[2]))
    return tuple(Plan.from_json(file.read_text(encoding="utf-8")) for file in ordered)


def under_way(store: RunStore, plan: Plan, plan_hash: str) -> tuple[Run, RunStatus] | None:
    """Return the latest run with this plan hash that is or may be active on a cluster, and its status; else None."""
    for run in reversed(store.submitted(plan.name, plan_hash)):
        status = statuses([run])[run.id]
        if status.active:
            return run, status
    return None


def submit_new(target: ClusterTarget, job: Job, rendered: Rendered, spec_text: str | None) -> Run:
    """Submit a job as a new run; raises LaunchError or OSError after removing both folder and job."""
    run = Run(Path(job.run_dir))
    run.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        run.path.mkdir()
    except FileExistsError:
        raise LaunchError("PT585", f"{run.id} has just been submitted by somebody else", "partool list") from None
    try:
        write_status(run.path, RunStatus(state="queued", created=time.time()))
        _write(run, rendered, spec_text)
        _submit(target, run, job, rendered)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Prevent other launchers from submitting a run during a ``with`` block.

    Raises LaunchError if another launcher is submitting the run.
    """
    with (run.path / _LOCK_FILE).open("a") as file:
        locked = True
        with suppress(OSError):  # a system without locks
            locked = posix.lock(file)
        if not locked:
            raise LaunchError("PT504", f"{run.id} is being submitted by somebody else", "partool status")
        yield


def submit_again(target: ClusterTarget, run: Run, job: Job, rendered: Rendered, spec_text: str | None) -> None:
    """Resubmit a run that has ended, to resume from its last checkpoint.

    Raises LaunchError or OSError after restoring the run's folder.
    """
    before = {name: _content(run.path / name) for name in (*rendered.files, SPEC_FILE, SUBMISSION_FILE, STATUS_FILE)}
    folders = ["", *(f"{folder.name}/" for folder in sorted(run.path.glob("task-*")))]
    names = [f"{folder}{name}" for folder in folders for name in _MARKS]
    marks = {name: _content(run.path / name) for name in names}
    try:
        for name in marks:
            (run.path / name).unlink(missing_ok=True)
        run.write_plan(job.plan, spec_text)
        _write(run, rendered, spec_text)
        status = read_status(run.path)
        queued = {"state": "queued", "ended": None, "exit_code": None, "reason": ""}
        write_status(run.path, status.model_copy(update=queued))
        target.remove(run)
        _submit(target, run, job, rendered)
    except BaseException:
        for name, content in {**before, **marks}.items():
            _restore(run.path / name, content)
        raise


def _submit(target: ClusterTarget, run: Run, job: Job, rendered: Rendered) -> None:
    """Submit a job; writes a record before and after submission, so that a killed launcher's job can be found."""
    record = Submission(target=job.plan.launch.target, submitted=time.time(), main=rendered.main, details={})
    _note(run, record)
    details = target.submit(run, job, rendered)
    try:
        _note(run, record.model_copy(update={"details": details}))
    except BaseException:
        with suppress(LaunchError):
            target.withdraw(run, details)
        raise


def _note(run: Run, record: Submission) -> None:
    temporary = run.path / f".{SUBMISSION_FILE}"
    temporary.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(run.path / SUBMISSION_FILE)


def _write(run: Run, rendered: Rendered, spec_text: str | None) -> None:
    (run.path / LOG_FOLDER).mkdir(exist_ok=True)
    files = {**rendered.files, **({} if spec_text is None else {SPEC_FILE: spec_text})}
    for name, text in files.items():
        file = run.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / LOG_FOLDER).mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")


def _content(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


def _restore(file: Path, content: str | None) -> None:
    if content is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(content, encoding="utf-8")

"""Status of a Slurm run: Slurm's report combined with the agent's ``status.json``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from partool.launch.slurm.text import SlurmJob
from partool.launch.store import Run
from partool.launch.telling import told_by_job
from partool.plan.run import (
    CANCEL_FILE,
    FAILURES_FILE,
    LOGS,
    PREEMPTIONS_FILE,
    RESTARTS_FILE,
    STATUS_FILE,
    RunStatus,
    State,
    read_status,
    write_status,
)

_TASK_FOLDERS = "task-*"
_PREEMPTED = 75
"""Exit code of agents that were asked to stop and have written a checkpoint."""
_CONFIGURATION = 78
_CLOCKS_S = 5.0
"""Seconds by which the clocks of nodes and controller may differ; requeueing a job takes longer."""
_ENDED_BADLY: dict[str, str] = {
    "TIMEOUT": "reached the job's time limit",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node could not boot",
    "OUT_OF_MEMORY": "the job ran out of memory",
    "DEADLINE": "its deadline passed",
    "REVOKED": "another cluster of the federation has taken it",
}
_WAITS_FOR: dict[str, str] = {
    "Resources": "waits for free nodes",
    "Priority": "waits behind jobs of higher priority",
    "BeginTime": "waits for its begin time, as a job put back to the queue does",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that failed; it will never start: cancel it",
    "JobHeldUser": "held by the user: scontrol release",
    "JobHeldAdmin": "held by an administrator",
    "launch failed requeued held": "held, because its nodes could not start it: scontrol release",
    "JobArrayTaskLimit": "waits for other tasks of the array",
    "ReqNodeNotAvail": "waits for nodes that are down or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionTimeLimit": "asks for more time than the partition allows; it will never start: cancel it",
    "PartitionNodeLimit": "asks for more nodes than the partition has; it will never start: cancel it",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for licences",
    "Cleaning": "its last start is being cleaned up",
}
"""Reason code of squeue(1) → its meaning."""


def run_status(run: Run, job: SlurmJob | None, job_id: str, tasks: Sequence[SlurmJob] = ()) -> RunStatus:
    """Return the status of a run from Slurm's record of the run's job or, for an array, of its tasks."""
    folders = sorted(run.path.glob(_TASK_FOLDERS), key=_task_number)
    if not folders:
        return _settled(run, merged(run.status(), job, run.path, job_id), job)
    by_index = {task.task: task for task in tasks if task.task is not None}
    each: dict[int, RunStatus] = {}
    for folder in folders:
        index = _task_number(folder)
        file = Run(folder).status() if (folder / STATUS_FILE).exists() else _unstarted(run)
        task = by_index.get(index)
        each[index] = _settled(Run(folder), merged(file, task, folder, f"{job_id}_{index}", run.path), task)
    return _together(run.status(), each)


def _settled(run: Run, status: RunStatus, job: SlurmJob | None) -> RunStatus:
    """Save and return the status of an ended job, because Slurm forgets the job after minutes (``MinJobAge``)."""
    if job is not None and not status.active:
        with suppress(OSError, ValueError):
            if not (run.path / STATUS_FILE).exists() or read_status(run.path) != status:
                write_status(run.path, status)
    return status


def merged(
    file: RunStatus, job: SlurmJob | None, folder: Path, job_id: str, array_folder: Path | None = None
) -> RunStatus:
    """Combine ``file``, the run's stored status, with ``job``; ``array_folder`` is the array's if the job is a task."""
    cancelled = any((place / CANCEL_FILE).exists() for place in (folder, array_folder or folder))
    output = (array_folder or folder) / LOGS / f"slurm-{job_id}.out"
    if job is None:
        return _forgotten(file, job_id, output, cancelled=cancelled)
    if job.waiting:
        parts = [_waits(job), counted(job, folder, array_folder), *(["to be cancelled"] if cancelled else [])]
        return _with(file, "queued", "; ".join(filter(None, parts)), ended=None, exit_code=None)
    if job.active:
        return _running(file, job)
    return _ended(file, job, output, cancelled=cancelled)


def counted(job: SlurmJob, folder: Path, array_folder: Path | None = None) -> str:
    """Return a text on how often the job was requeued; empty if it never was.

    The job's script counts the requeues. Those by Slurm itself, as when a node fails, it counts when it next starts.
    """
    places = (folder, array_folder or folder)
    by_slurm = max(0, job.restarts - _counted_restarts(job, folder))
    texts = []
    for name, what, more in ((PREEMPTIONS_FILE, "after preemption", by_slurm), (FAILURES_FILE, "after failures", 0)):
        number = max((_number(place / name) for place in places), default=0) + more
        if number:
            texts.append(f"requeued {what}, {number} time{'s' if number > 1 else ''}")
    return "; ".join(texts)


def _counted_restarts(job: SlurmJob, folder: Path) -> int:
    """Return how many restarts of a job its script has counted; all of them if no script says so."""
    try:
        words = (folder / RESTARTS_FILE).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return job.restarts
    return int(words[1]) if len(words) == 2 and words[0] == job.id and words[1].isdigit() else job.restarts


def _number(file: Path) -> int:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdigit() else 0


def _waits(job: SlurmJob) -> str:
    code, _, rest = job.reason.partition(",")
    if job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"):
        return f"held ({job.state})"
    words = _WAITS_FOR.get(code) or ("a limit of the account or the QOS" if code.startswith(("QOS", "Assoc")) else "")
    return f"{words} ({code})" + (f":{rest}" if rest else "") if words else job.reason


def _running(file: RunStatus, job: SlurmJob) -> RunStatus:
    # The file may describe the previous attempt, or an attempt that has just ended and may be requeued.
    old = job.start is not None and (
        (file.ended is not None and file.ended < job.start)
        # an attempt whose node died never recorded its end
        or (file.ended is None and file.started is not None and file.started < job.start - _CLOCKS_S)
    )
    if job.state == "SUSPENDED":
        return _with(file, "running", "suspended by Slurm")
    if job.state == "CONFIGURING":
        return _with(file, "starting", "its nodes are being set up", ended=None, exit_code=None)
    if file.state in ("queued", "starting") or old:
        return _with(file, "starting", "", ended=None, exit_code=None)
    if file.state in ("done", "running"):
        return file
    return _with(file, "running", f"the job is ending: {file.state}" + (f", {file.reason}" if file.reason else ""))


def _ended(file: RunStatus, job: SlurmJob, output: Path, *, cancelled: bool) -> RunStatus:
    exit = job.exit
    code = exit.code if exit and not exit.signal else None
    said = file.reason if file.state in ("failed", "preempted") and file.ended is not None else ""
    ended = job.end or file.ended
    if job.state == "COMPLETED" or file.state == "done":
        return _with(file, "done", file.reason if file.state == "done" else "", ended=ended, exit_code=0)
    if job.state == "CANCELLED" or cancelled:
        return _with(file, "cancelled", "cancelled", ended=ended, exit_code=code or file.exit_code)
    if job.state == "PREEMPTED" or code == _PREEMPTED:
        reason = said or ("preempted" if job.state == "PREEMPTED" else "preempted as often as allowed")
        return _with(file, "preempted", reason, ended=ended, exit_code=_PREEMPTED)
    if job.state in _ENDED_BADLY:
        return _with(file, "failed", _ENDED_BADLY[job.state], ended=ended, exit_code=code or file.exit_code or None)
    return _with(file, "failed", said or _why(job, output), ended=ended, exit_code=code)


def _why(job: SlurmJob, output: Path) -> str:
    """Return why a job failed whose agent has not said it: the telling line of its output, and its exit code."""
    text = job.exit.text() if job.exit else "failed"
    if message := told_by_job(output):
        return f"{message} ({text})"
    if job.exit and job.exit.code == _CONFIGURATION and not job.exit.signal:
        return f"{text}: it would fail however often it is tried; the logs say why"
    return text if job.reason in ("", "NonZeroExitCode", "JobLaunchFailure") else f"{text} ({job.reason})"


def _forgotten(file: RunStatus, job_id: str, output: Path, *, cancelled: bool) -> RunStatus:
    if file.active:
        state: State = "cancelled" if cancelled else "failed"
        message = told_by_job(output)
        last = f"the last message in its output: {message}" if message else "the run has not said how it ended"
        return _with(file, state, f"Slurm no longer knows job {job_id}; {last}")
    if cancelled and file.state != "done":
        return _with(file, "cancelled", "cancelled")
    return file


def _unstarted(run: Run) -> RunStatus:
    return RunStatus(state="queued", created=run.status().created)


def _together(file: RunStatus, tasks: dict[int, RunStatus]) -> RunStatus:
    """Return an array's status. Active tasks determine its state; if no task is active, failed tasks determine it."""
    states = {status.state for status in tasks.values()}
    order: tuple[State, ...] = ("running", "starting", "queued", "unknown", "failed", "preempted", "cancelled", "done")
    state = next(state for state in order if state in states)
    if state == "queued" and states & {"done", "failed", "preempted", "cancelled"}:
        state = "running"
    texts = [f"task {index}: {s.state}" + (f" ({s.reason})" if s.reason else "") for index, s in sorted(tasks.items())]
    ended = [s.ended for s in tasks.values() if s.ended is not None]
    codes = [s.exit_code for s in tasks.values() if s.exit_code]
    active = state in ("running", "starting", "queued")
    return file.model_copy(
        update={
            "state": state,
            "reason": "; ".join(texts),
            "attempt": max(s.attempt for s in tasks.values()),
            "started": min((s.started for s in tasks.values() if s.started is not None), default=None),
            "ended": None if active else max(ended, default=None),
            "exit_code": None if active else codes[0] if codes else 0 if state == "done" else None,
        }
    )


def _with(file: RunStatus, state: State, reason: str, **more: Any) -> RunStatus:
    return file.model_copy(update={"state": state, "reason": reason, **more})


def _task_number(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0

"""Describes runs as text and as JSON."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

from partool.launch.checkpoints import best_words
from partool.launch.store import Run
from partool.plan.evaluation_result import EvaluationResult, read_result
from partool.plan.event_log import StepData, event_log, last_events, parse_event
from partool.plan.outline import outline
from partool.plan.progress import read_progress, seconds_since
from partool.plan.record import DamagedRecordError, Noted, UnixTime
from partool.plan.run import ERRORS, RunStatus, lost_peer, read_status
from partool.spec.numbers import duration

_TAIL_BYTES = 1 << 16
_PARTS_OF_STEPS = ("training", "fetching", "logging")
"""Phases of ranks that are parts of each step (:data:`partool_runtime.pulse.IN_STEPS`)."""
_LONG_PART_S = 10.0
"""Seconds after which a part of a step, other than training itself, is worth a word."""


def as_json(run: Run, status: RunStatus) -> dict[str, object]:
    """Return everything known about a run as data to be written as JSON."""
    return {
        "id": run.id,
        "name": run.name,
        "path": str(run.path),
        **status.model_dump(mode="json"),
        "submission": _submission(run),
        "progress": last_step(run),
        "last_step": _last_step(run, status),
        "last_validation": _last_validation(run),
    }


def as_text(run: Run, status: RunStatus) -> str:
    """Return a run's state in a few lines."""
    lines = [f"{run.id}: {status.state}" + (f" ({status.reason})" if status.reason not in ("", status.state) else "")]
    if submitted := _submitted(run):
        lines.append(f"  {submitted}")
    if status.state == "running" and status.started is not None:
        where = f"pid {status.pid} on {status.host}, " if status.pid is not None else ""
        lines.append(f"  {where}for {duration(time.time() - status.started)}, attempt {status.attempt}")
    elif status.ended is not None and status.started is not None:
        took = duration(status.ended - status.started)
        how = "ended" if status.exit_code is None else f"exit code {status.exit_code}"
        lines.append(f"  {how} after {took}, {status.attempt} attempt(s)")
    if result := _result(run):
        lines += [f"  {line}" for line in result.lines()]
    elif step := last_step(run):
        total = _steps(run)
        lines.append(f"  step {step['step']}" + (f" of {total}" if total else "") + f", loss {_loss(step.get('loss'))}")
    if not result and (sets := _set_words(run)):
        lines.append(f"  {sets}")
    if best := best_words(run):
        lines.append(f"  {best}")
    if ago := step_age(run, status):
        lines.append(f"  {ago}")
    lines.append(f"  {display(run.path)}")
    return "\n".join(lines)


def _last_validation(run: Run) -> dict[str, Any] | None:
    """Return the data of rank 0's latest validation, as far as the end of its log has one."""
    events = last_events(event_log(run.path, 0))
    return next((event["data"] for event in reversed(events) if event["kind"] == "validation"), None)


def _set_words(run: Run) -> str:
    """Return the losses of the named sets at the latest validation, in words; empty without such sets."""
    data = _last_validation(run)
    if data is None or not data.get("sets"):
        return ""
    losses = [f"{name} {_loss(each.get('loss'))}" for name, each in data["sets"].items()]
    return f"validation at step {data['step']}: {', '.join(losses)}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def step_age(run: Run, status: RunStatus) -> str:
    """Return a text such as ``last step 3 min 5 s ago``, with what the ranks do now if that is no step.

    Of a run elsewhere it is the last logged step, or why that is not known. Empty for a run that does not run, or whose
    agent has noted nothing yet.
    """
    if status.logged_step is not None:
        return f"step {status.logged_step.step} logged {duration(seconds_since(status.logged_step.at))} ago"
    if status.unknown_step:
        return status.unknown_step
    progress = read_progress(run.path) if status.state == "running" else None
    if progress is None or progress.attempt < status.attempt:
        return ""
    texts = [f"last step {duration(seconds_since(progress.step_at))} ago"] if progress.step_at else ["no step yet"]
    phase_s = seconds_since(progress.phase_at)
    if progress.phase not in _PARTS_OF_STEPS or (progress.phase != "training" and phase_s >= _LONG_PART_S):
        texts.append(f"{progress.phase} for {duration(phase_s)}")
    return ", ".join(texts)


def _submitted(run: Run) -> str:
    """Return a text that names the scheduler of a run; empty for a run on this machine."""
    try:
        submission = run.submission()
    except ValueError:
        return "no readable submission.json"
    if submission is None:
        return ""
    facts = ", ".join(
        f"{name.replace('_', ' ')} {value}"
        for name, value in sorted(submission.details.items())
        if value and name != "uid"
    )
    return f"{submission.target}: {facts}; submitted {duration(time.time() - submission.submitted)} ago"


def last_step(run: Run) -> StepData | None:
    """Return the data of rank 0's latest ``step`` event; None if rank 0 has not written such an event yet."""
    try:
        with (run.path / "events" / "rank-0.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        event = parse_event(line)  # the first line may be cut off, the last line incomplete
        if event is not None and event["kind"] == "step":
            return cast(StepData, event["data"])
    return None


def errors_as_text(run_dir: Path) -> str:
    """Return the reason why a run failed and the error records of its ranks; empty if the run has neither.

    The reason comes first. The records are sorted by attempt, and within an attempt by the time of the error; those of
    ranks that only noticed another rank's end come last. A rank that a signal ended has a record of its agent.
    """
    try:
        status = read_status(run_dir)
        texts = [f"{status.reason}\n"] if status.state == "failed" and status.reason else []
    except (OSError, ValueError):  # pydantic's errors are ValueErrors
        texts = []
    records = [record for file in (run_dir / ERRORS).glob("rank-*.json") if (record := _record(file)) is not None]
    for record in sorted(records, key=lambda record: (record.attempt, lost_peer(record.message), record.time)):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
        head = f"rank {record.rank}, attempt {record.attempt}, {when}"
        noticed = " (noticed the end of another)" if lost_peer(record.message) else ""
        # a rank that a signal ended has the end of its log in place of a traceback
        said = "" if record.type else f"{record.message}\n"
        texts.append(f"{head}{noticed}\n{said}{record.traceback.rstrip()}\n")
    return "\n".join(texts)


class _ErrorRecord(Noted):
    """The parts of a record of ``errors/`` that are shown: :class:`partool_runtime.agent.error_files.ErrorRecord`."""

    rank: int
    attempt: int
    time: UnixTime
    type: str
    message: str
    traceback: str


def _record(file: Path) -> _ErrorRecord | None:
    """Return the record in a file; None for a file that holds none, as after a crash of the machine."""
    try:
        return _ErrorRecord.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None


def display(path: Path) -> str:
    """Return a path as the user would write it: relative to the current folder if the path lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _submission(run: Run) -> dict[str, Any] | None:
    try:
        submission = run.submission()
    except ValueError:
        return None
    return submission.model_dump(mode="json") if submission else None


def _last_step(run: Run, status: RunStatus) -> dict[str, Any] | None:
    if status.logged_step is not None:
        return {"attempt": status.attempt, "step": status.logged_step.step, "step_at": status.logged_step.at}
    progress = read_progress(run.path)
    return None if progress is None else progress.model_dump(mode="json")


def _result(run: Run) -> EvaluationResult | None:
    try:
        return read_result(run.path)
    except DamagedRecordError:
        return None


def _steps(run: Run) -> int | None:
    try:
        return outline(run.plan_file).training.steps
    except (OSError, ValueError):
        return None

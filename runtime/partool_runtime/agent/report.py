"""The one message in which the agent reports how a run ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partool.plan.run import rank_log
from partool_runtime.agent.error_files import ErrorRecord, put_record, read_errors
from partool_runtime.agent.failures import is_lost_peer
from partool_runtime.agent.supervision import Supervision
from partool_runtime.errors import EXIT_CONFIGURATION, EXIT_DONE, EXIT_PREEMPTED

_TRACEBACK_LINES = 24
_LOG_LINES = 10
_RECORD_BYTES = 1 << 14
AFTER_CHECKPOINT, BEFORE_FIRST_STEP = "after a checkpoint", "before the first step"


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of an attempt: one line for the status and a text for the user, empty if all went well."""

    reason: str
    text: str
    what: str = ""
    """The first failure without the rank's number; empty if no rank failed by itself."""
    time: float = 0.0
    """Unix time of the first failure."""
    short: str = ""
    """Reason as a short clause: ``rank 0 failed (killed by SIGKILL)``."""
    lost_peer: bool = False
    """True if the failure is the lost connection to a rank; this rank is on another node."""


def summarise(run_dir: Path, attempt: int, supervision: Supervision, where: str = "") -> Summary:
    """Return how an attempt ended on this node, from exit codes and the ranks' error records.

    ``where`` is a text that names the node; messages show it after the number of the rank that failed.
    """
    code = supervision.exit_code
    if code == EXIT_DONE:
        return _overdue(supervision, where)
    if code == EXIT_PREEMPTED:
        reason = stopped_by(supervision.signals[0].name if supervision.signals else "")
        if supervision.overdue and not supervision.saved:
            reason = f"{reason}, {supervision.killed}"
            return Summary(reason, f"partool: {reason}\n{_logs(run_dir, attempt)}")
        return Summary(reason, f"partool: {reason}, {_saved(supervision)}")
    if supervision.stalled:
        return _stalled(run_dir, attempt, supervision)
    errors = read_errors(run_dir, attempt)
    errors |= _deaths(run_dir, attempt, supervision, errors)
    first = _first_failure(supervision, errors)
    if first is None:
        ranks = _ranks(rank for rank, status in supervision.codes.items() if status in (-signal.SIGKILL, None))
        reason = f"{ranks}{where} killed: {supervision.killed}"
        if supervision.finishing:
            reason += "; the last step was not saved"
        text = f"partool: {reason}\n{_logs(run_dir, attempt)}"
        return Summary(reason, text, time=time.time(), short=reason, lost_peer=bool(supervision.trouble_elsewhere))
    return _failure(run_dir, attempt, supervision, (first, where), errors)


def _overdue(supervision: Supervision, where: str) -> Summary:
    """Return the result of a run that has done its work; it names the ranks that did not end by themselves."""
    if not supervision.killed_ranks:
        return Summary("", "")
    reason = f"{_ranks(supervision.killed_ranks)}{where} did not end after the last step and had to be killed"
    if supervision.stalled:
        reason += f" ({supervision.stalled})"
    return Summary(reason, f"partool: {reason}; the last step is saved", short=reason)


def _stalled(run_dir: Path, attempt: int, supervision: Supervision) -> Summary:
    reason = supervision.stalled
    text = f"partool: {reason}\n{_logs(run_dir, attempt)}"
    what = reason.partition(";")[0]
    elsewhere = supervision.stalled_elsewhere
    return Summary(reason, text, what=what, time=time.time(), short=reason, lost_peer=elsewhere)


def _saved(supervision: Supervision) -> str:
    """Return a text that tells when a requested stop took effect, and which ranks had to be killed after it."""
    if supervision.early:
        return BEFORE_FIRST_STEP
    killed = [rank for rank, code in supervision.codes.items() if code not in (EXIT_DONE, EXIT_PREEMPTED)]
    return AFTER_CHECKPOINT + (f"; {_ranks(killed)} did not end and had to be killed" if killed else "")


def stopped_by(signal_name: str) -> str:
    """Return the text that gives a stop signal as the reason why a run ended."""
    return f"stopped by {signal_name or 'a signal to a rank'}"


def shortened(text: str, most_bytes: int) -> str:
    """Return ``text``; if it is longer than ``most_bytes``, return only the beginning and the end of the text."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    head, gap = data[: most_bytes // 4], b"\n...\n"
    tail = data[len(head) + len(gap) - most_bytes :]
    return (head + gap + tail).decode(errors="ignore")


def repeated(count: int, reason: str) -> str:
    """Return a text which says that a run failed ``count`` times in a row for ``reason``."""
    return f"the same failure {count} times in a row: {reason}"


def _by_itself(supervision: Supervision, code: int | None) -> bool:
    """Return True for the exit code of a rank that failed by itself: it did not stop on request, nor was it killed."""
    killed = bool(supervision.killed) and code in (-signal.SIGKILL, None)
    return code not in (EXIT_DONE, EXIT_PREEMPTED) and not killed


def _deaths(
    run_dir: Path, attempt: int, supervision: Supervision, errors: dict[int, ErrorRecord]
) -> dict[int, ErrorRecord]:
    """Record and return the ends of the ranks that died by themselves without a record, as those that a signal kills.

    Such an end is dated to when the rank was last seen alive, because other ranks may record a lost connection before
    the agent notices it.
    """
    records = {}
    for rank, code in supervision.codes.items():
        if rank in errors or not _by_itself(supervision, code):
            continue
        records[rank] = ErrorRecord(
            rank=rank,
            attempt=attempt,
            time=supervision.last_alive.get(rank, time.time()),
            type="",
            message=_end_without_record(code) + _full(run_dir),
            traceback="\n".join(_tail(rank_log(run_dir, attempt, rank, "stderr"), _LOG_LINES)),
            exit_code=-signal.SIGKILL if code is None else code,
        )
        with suppress(OSError):  # a disk without room
            put_record(run_dir, records[rank])
    return records


def _first_failure(supervision: Supervision, errors: dict[int, ErrorRecord]) -> int | None:
    """Return the rank whose failure came first; None if all failed ranks were killed by the agent."""
    times = {rank: errors[rank].time for rank in supervision.codes if rank in errors}
    return min(times, key=lambda rank: times[rank], default=None)


def _failure(
    run_dir: Path, attempt: int, supervision: Supervision, first: tuple[int, str], errors: dict[int, ErrorRecord]
) -> Summary:
    rank, where = first
    error = errors[rank]
    what = _headline(error)
    lines = [f"partool: rank {rank}{where} failed (attempt {attempt}): {what}"]
    if error.exit_code == EXIT_CONFIGURATION:
        lines += [f"  help: {error.help}"] * bool(error.help)
    else:
        lines += ["  " + line for line in error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]]
    others = [other for other, code in supervision.codes.items() if other != rank and code != EXIT_DONE]
    if others:
        lines.append(f"{_ranks(others)} ended after it")
    lines.append(_logs(run_dir, attempt))
    return Summary(
        f"rank {rank}{where}: {what}",
        "\n".join(lines),
        what=what,
        short=f"rank {rank}{where} failed ({what})",
        time=error.time,
        lost_peer=is_lost_peer(error),
    )


def _headline(error: ErrorRecord) -> str:
    name = error.code or error.type
    first_line = error.message.splitlines()[0] if error.message else ""
    return ": ".join(filter(None, (name, first_line)))


def _end_without_record(code: int | None) -> str:
    if code is None:
        return "does not end, not even killed"
    if code >= 0:
        return f"ended with exit code {code} and no error record"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (often the kernel's out-of-memory killer)" if name == "SIGKILL" else "")


def _full(run_dir: Path) -> str:
    """Return a remark if the disk of the run's folder has no room for an error record; empty if there is room."""
    room = os.statvfs(run_dir)
    return f"; the file system of {run_dir} is full" if room.f_bavail * room.f_frsize < _RECORD_BYTES else ""


def _tail(path: Path, count: int) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return ("ranks " if len(numbers) > 1 else "rank ") + ", ".join(map(str, numbers))


def _logs(run_dir: Path, attempt: int) -> str:
    return f"logs: {rank_log(run_dir, attempt, 0, 'stdout').parent}"

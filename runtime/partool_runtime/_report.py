"""The one message in which the agent says how a run ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from partool.plan.run import rank_log
from partool_runtime._error_files import ErrorRecord, read_errors
from partool_runtime._supervision import Supervision
from partool_runtime.errors import EXIT_CONFIGURATION, EXIT_DONE, EXIT_PREEMPTED

_TRACEBACK_LINES = 24
_LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: one line for the status and a text for the user, empty if all went well."""

    reason: str
    text: str


def summarise(run_dir: Path, attempt: int, supervision: Supervision) -> Summary:
    """Say how the last attempt ended, from exit codes and the ranks' error records."""
    code = supervision.exit_code
    asked = supervision.signals[0].name if supervision.signals else "a signal to a rank"
    if code == EXIT_DONE:
        return Summary("", "")
    if code == EXIT_PREEMPTED:
        reason = f"stopped by {asked}"
        return Summary(reason, f"partool: {reason}, after a checkpoint")
    errors = read_errors(run_dir, attempt)
    first = _first_failure(supervision, errors)
    if first is None:
        ranks = _ranks(rank for rank, status in supervision.codes.items() if status in (-signal.SIGKILL, None))
        reason = f"{ranks} killed: {supervision.killed}"
        return Summary(reason, f"partool: {reason}\n{_logs(run_dir, attempt)}")
    return _failure(run_dir, attempt, supervision, first, errors)


def _first_failure(supervision: Supervision, errors: dict[int, ErrorRecord]) -> int | None:
    """Return the rank whose failure came first; None if all that failed were killed by the agent.

    A rank that died without a word counts from when it was last seen alive: its peers' complaints about a lost
    connection may be on file before its end is noticed.
    """

    def own(rank: int, code: int | None) -> bool:
        return code not in (EXIT_DONE, EXIT_PREEMPTED) and not (supervision.killed and code in (-signal.SIGKILL, None))

    times = {
        rank: errors[rank].time if rank in errors else supervision.last_alive.get(rank, 0.0)
        for rank, code in supervision.codes.items()
        if rank in errors or own(rank, code)
    }
    return min(times, key=lambda rank: times[rank], default=None)


def _failure(
    run_dir: Path, attempt: int, supervision: Supervision, rank: int, errors: dict[int, ErrorRecord]
) -> Summary:
    error = errors.get(rank)
    what = _headline(error) if error else _end_without_record(supervision.codes[rank])
    reason = f"rank {rank}: {what}"
    lines = [f"partool: rank {rank} failed (attempt {attempt}): {what}"]
    if error is None:
        lines += _tail(rank_log(run_dir, attempt, rank, "stderr"), _LOG_LINES)
    elif error.exit_code == EXIT_CONFIGURATION:
        lines += [f"  help: {error.help}"] * bool(error.help)
    else:
        lines += ["  " + line for line in error.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]]
    others = [other for other, code in supervision.codes.items() if other != rank and code != EXIT_DONE]
    if others:
        lines.append(f"{_ranks(others)} ended after it")
    lines.append(_logs(run_dir, attempt))
    return Summary(reason, "\n".join(lines))


def _headline(error: ErrorRecord) -> str:
    name = error.code or error.type
    first_line = error.message.splitlines()[0] if error.message else ""
    return f"{name}: {first_line}" if first_line else name


def _end_without_record(code: int | None) -> str:
    if code is None:
        return "does not end, not even killed"
    if code >= 0:
        return f"ended with exit code {code} and no error record"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _tail(path: Path, count: int) -> list[str]:
    try:
        return ["  " + line for line in path.read_text("utf-8", errors="replace").splitlines()[-count:]]
    except FileNotFoundError:
        return []


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return ("ranks " if len(numbers) > 1 else "rank ") + ", ".join(map(str, numbers))


def _logs(run_dir: Path, attempt: int) -> str:
    return f"logs: {rank_log(run_dir, attempt, 0, 'stdout').parent}"

"""Parses the output of Slurm's commands, for Slurm 22.05 to 25.x.

Text is parsed, not JSON: ``squeue --json`` has another shape in every version (exit codes, times, states), and
``scontrol --json`` does not exist before 23.02. The formats are described in squeue(1), scontrol(1), sacct(1) and
sbatch(1), https://slurm.schedmd.com/squeue.html.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

_ACTIVE = frozenset(
    {
        "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING", "RUNNING",
        "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT",
    }
)  # fmt: skip
"""States of a job that has not ended: squeue(1), job state codes."""
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
COLUMNS = (
    ("JobID", 20), ("ArrayJobID", 20), ("ArrayTaskID", 24), ("State", 20), ("exit_code", 16), ("RestartCnt", 12),
    ("StartTime", 24), ("EndTime", 24), ("SubmitTime", 24), ("Name", 64), ("Reason", 128),
)  # fmt: skip
"""Name and width of each column of squeue. Widths are fixed, because a separator could also occur in a name."""
ACCOUNTING = ("JobID", "State", "ExitCode", "Start", "End", "Submit", "JobName")
"""Columns of sacct."""


class ExitCode(NamedTuple):
    """Exit code and signal of a job's script."""

    code: int
    signal: int
    """Number of the signal that killed the script; 0 if no signal did."""

    def text(self) -> str:
        """Return the exit code in words."""
        if not self.signal:
            return f"exit code {self.code}"
        name = signal.Signals(self.signal).name if self.signal in list(signal.Signals) else f"signal {self.signal}"
        return f"killed by {name}"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """Slurm's record of a job, or of one task of an array."""

    job_id: str
    """Job id; for a task of an array, the id of the array, which sbatch showed to the user."""
    task: int | None
    state: str
    """One of squeue's long state names; additions for an ended job (``CANCELLED by 0``) are left out."""
    reason: str = ""
    """Slurm's reason why the job waits or ended; empty if there is none."""
    exit: ExitCode | None = None
    """Exit code; None while the job has not ended."""
    restarts: int = 0
    start: float | None = None
    """Unix time of the start; for a waiting job, the Unix time of the expected start."""
    end: float | None = None
    """Unix time of the end; for a running job, the Unix time at which its time limit ends."""
    submitted: float | None = None
    """Unix time of the submission."""
    name: str = ""

    @property
    def id(self) -> str:
        """Id in the form that scancel takes."""
        return self.job_id if self.task is None else f"{self.job_id}_{self.task}"

    @property
    def active(self) -> bool:
        """True if the job runs, waits to run, or may run again."""
        return self.state in _ACTIVE

    @property
    def waiting(self) -> bool:
        """True if the job is in the queue."""
        return self.state in _WAITING


def last_words(text: str) -> str:
    """Return the last line that a command wrote, without the command's name at its beginning."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Try ")]
    return re.sub(r"^(\S*/)?(s[a-z]+|slurm_load_\w+): ?(error: |fatal: )?", "", lines[-1]) if lines else ""


def parse_submission(text: str) -> tuple[str, str]:
    """Return job id and cluster (empty: default cluster) that ``sbatch --parsable`` printed; raises ValueError."""
    # prolog scripts and plug-ins of the site may print lines before the answer
    for line in reversed(text.splitlines()):
        if match := re.fullmatch(r"(\d+)(?:;([\w.-]+))?", line.strip()):
            return match[1], match[2] or ""
    raise ValueError(f"no job id in {text.strip()[:200]!r}")


def parse_queue(text: str) -> list[SlurmJob]:
    """Return the jobs in squeue's answer."""
    jobs = []
    for line in text.splitlines():
        row, start = {}, 0
        for name, width in COLUMNS:
            row[name] = line[start : start + width].strip()
            start += width
        if not row["JobID"].isdigit():
            continue  # "CLUSTER: name" of --clusters
        task = row["ArrayTaskID"]
        jobs.append(
            _job(
                (row["ArrayJobID"] or row["JobID"], int(task) if task.isdigit() else None),
                row["State"],
                row["exit_code"],
                (row["StartTime"], row["EndTime"], row["SubmitTime"]),
                restarts=int(row["RestartCnt"]) if row["RestartCnt"].isdigit() else 0,
                name=row["Name"],
                reason=row["Reason"],
            )
        )
    return jobs


def parse_record(text: str) -> list[dict[str, str]]:
    """Return the fields of each line of ``scontrol show ... --oneliner``.

    A value may contain blanks; the next field begins at the next word with an equals sign.
    """
    records = []
    for line in text.splitlines():
        matches = list(re.finditer(r"(?:^|\s)([A-Za-z][\w:/.]*)=", line))
        ends = [match.start() for match in matches[1:]] + [len(line)]
        record: dict[str, str] = {}
        for match, end in zip(matches, ends, strict=True):
            record.setdefault(match[1], line[match.end() : end].strip())  # a Comment may contain apparent fields
        if record:
            records.append(record)
    return records


def parse_accounting(text: str) -> list[SlurmJob]:
    """Return the jobs in sacct's answer (``--parsable2 --allocations``)."""
    jobs = []
    for line in text.splitlines():
        parts = line.split("|")
        row = dict(zip(ACCOUNTING, parts, strict=False))
        match = re.fullmatch(r"(\d+)(?:_(\d+))?", row.get("JobID", ""))
        if match is None or len(parts) < len(ACCOUNTING):
            continue  # array tasks that never began are listed as 12_[3-9]
        which = (match[1], int(match[2]) if match[2] else None)
        jobs.append(
            _job(which, row["State"], row["ExitCode"], (row["Start"], row["End"], row["Submit"]), name=row["JobName"])
        )
    return jobs


def parse_exit(text: str) -> ExitCode:
    """Return an exit code written as ``9:0`` or ``0:11``, or in wait(2)'s encoding, which squeue of 22.05 prints."""
    if ":" in text:
        code, _, by = text.partition(":")
        return ExitCode(int(code), int(by))
    raw = int(text) if text.isdigit() else 0
    return ExitCode(raw >> 8 & 0xFF, raw & 0x7F)


def parse_time(text: str) -> float | None:
    """Return a local time in Slurm's format as Unix time; None for the texts ``N/A``, ``Unknown`` and ``None``."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None


def parse_duration(text: str) -> float | None:
    """Return a duration in seconds; None if the text is no duration.

    The text reads ``D-HH:MM:SS``, ``HH:MM:SS`` or ``MM:SS``, or is a number of minutes.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, numbers[0], numbers[1] if len(numbers) == 2 else 0
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _job(
    which: tuple[str, int | None], state: str, code: str, times: tuple[str, str, str], **more: str | int
) -> SlurmJob:
    word = (state.split() or ["UNKNOWN"])[0].rstrip("+")
    reason = str(more.get("reason", "")).replace("_", " ").strip()
    make: Callable[..., SlurmJob] = SlurmJob
    return make(
        job_id=which[0],
        task=which[1],
        state=word,
        reason="" if reason in ("None", "(null)") else reason,
        exit=None if word in _ACTIVE else parse_exit(code),
        restarts=int(more.get("restarts", 0)),
        start=parse_time(times[0]),
        end=parse_time(times[1]),
        submitted=parse_time(times[2]),
        name=str(more.get("name", "")),
    )

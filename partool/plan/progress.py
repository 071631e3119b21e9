"""How far a run has come, as its agent notes it: ``progress.json`` in the run's folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from partool.plan.record import Record

PROGRESS_FILE = "progress.json"


class RunProgress(Record):
    """Content of ``progress.json``; the agent of node 0 writes it every few seconds."""

    attempt: int
    step: int
    """Completed steps; 0 before the first step of the attempt has ended."""
    step_at: float
    """Unix time at which that step ended; 0.0 before the first."""
    phase: str
    """What the ranks do, such as ``training`` or ``saving``."""
    phase_at: float
    """Unix time at which the agent first saw this phase."""


class LoggedStep(Record):
    """A step as rank 0's output names it, of a run whose ``progress.json`` cannot be read from here."""

    step: int
    at: float
    """Unix time at which the line was written."""


def write_progress(run_dir: Path, progress: RunProgress) -> None:
    """Replace the file; a reader sees the old or the new content. Raises OSError."""
    temporary = run_dir / f".{PROGRESS_FILE}.{os.getpid()}"
    temporary.write_text(progress.model_dump_json() + "\n", encoding="utf-8")
    temporary.replace(run_dir / PROGRESS_FILE)


def read_progress(run_dir: Path) -> RunProgress | None:
    """Return what the agent has noted; None if it has noted nothing that can be read."""
    try:
        return RunProgress.model_validate_json((run_dir / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # errors of pydantic and of UTF-8 are ValueErrors
        return None


def seconds_since(at: float) -> float:
    """Return the seconds since a Unix time, 0.0 if another machine's clock puts it into the future."""
    return max(0.0, time.time() - at)

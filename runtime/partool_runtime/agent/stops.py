"""What an agent says about a request to stop: how long it waits, and what is lost if no checkpoint comes of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from partool.strategies.targets import SCHEDULERS, TARGETS
from partool_runtime.agent.failures import FailureLog
from partool_runtime.agent.supervision import Supervision


def waiting(signals: Sequence[signal.Signals], window_s: float) -> str:
    """Return the line that answers the first request to stop."""
    another = "a second Ctrl-C" if signals[0] == signal.SIGINT else "SIGINT (Ctrl-C)"
    return f"{signals[0].name}: up to {window_s:g} s for the step to end and its checkpoint; {another} ends it at once"


def left_without_checkpoint(supervision: Supervision) -> bool:
    """Return True if ranks that were asked to stop were killed before a checkpoint was complete."""
    safe = supervision.early or supervision.saved or supervision.complete
    return supervision.asked and bool(supervision.killed) and not safe


def losses(failures: FailureLog, *, target: str, run_dir: Path, since: float | None) -> str:
    """Return lines that say what a killed run keeps and loses, and how to go on.

    ``since`` is the Unix time of the run's start, or None if it is not known.
    """
    saved, reached = failures.saved_step, failures.reached_step
    begun = max(filter(None, (failures.saved_at, since)), default=None)
    spent = "" if begun is None else f": {_duration(time.time() - begun)} of training"
    steps = f"{reached - saved} steps and the one under way" if reached > saved else "the step under way"
    if not saved:
        return f"  lost: everything since the start, {steps}{spent}; no checkpoint was complete\n  help: {_shorter()}"
    kept = f"  kept: the checkpoint of step {saved}\n  lost: what followed it, {steps}{spent}"
    return f"{kept}\n  help: {_continued(target, run_dir)} goes on from step {saved}"


def _shorter() -> str:
    return (
        "there is no checkpoint: a new start begins anew; launch: {shutdown_timeout_s: auto} gives a step enough time, "
        "checkpoint: {every: 30min} limits the loss"
    )


def _continued(target: str, run_dir: Path) -> str:
    """Return the command that continues a run; of an array, the folder's name is that of a task."""
    name = run_dir.parent.name if re.fullmatch(r"task-\d+", run_dir.name) else run_dir.name
    if TARGETS[target].starter == "by hand":
        return "the same command on each node"
    scheduled = "the scheduler's next start, or " if target in SCHEDULERS else ""
    return f"{scheduled}partool launch --resume {name}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

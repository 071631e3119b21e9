"""Event logs of trainings that never were, and folders of their runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from partool.plan.event_log import Event, event_log
from partool.plan.run import RunStatus, write_status

EventRow = tuple[str, float, dict[str, Any]]
BEGAN = 1.7e9
"""Unix time of a run's begin."""
STEP_S = 2.0


def start(attempt: int = 1, after: int = 0, at: float = BEGAN, ranks: int = 2) -> EventRow:
    data = {"attempt": attempt, "world_size": ranks, "plan_hash": "", "resumed_from": after}
    return "start", at, data


def steps(first: int, last: int, *, at: float = BEGAN, loss: float = 5.0, **figures: Any) -> Iterator[EventRow]:
    """Yield steps whose loss falls by 0.01 a step from ``loss``, two seconds each after ``at``."""
    for number, step in enumerate(range(first, last + 1), 1):
        data = {"step": step, "loss": loss - 0.01 * step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64}
        data |= {"step_time_s": STEP_S, "tokens_per_s": 32.0, "mfu": None, "memory_bytes": 2**30}
        yield "step", at + STEP_S * number, data | figures


def validation(step: int, loss: float | None, at: float) -> EventRow:
    return "validation", at, {"step": step, "loss": loss, "tokens": 8}


def end(step: int, at: float, code: int = 0, reason: str = "all steps done") -> EventRow:
    return "end", at, {"step": step, "exit_code": code, "reason": reason}


def parsed(rows: Iterable[EventRow]) -> list[Event]:
    return [{"v": 1, "kind": kind, "t": t, "rank": 0, "data": data} for kind, t, data in rows]  # type: ignore[typeddict-item]


def write_log(run_dir: Path, rows: Iterable[EventRow]) -> Path:
    """Write the log of a run's first rank; returns its path."""
    path = event_log(run_dir, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in parsed(rows)))
    return path


def run_folder(home: Path, name: str, rows: Iterable[EventRow], plan: str | None, **status: Any) -> Path:
    """Make the folder of a run, with the text of its plan if there is one."""
    folder = home / "runs" / name
    folder.mkdir(parents=True)
    if plan is not None:
        (folder / "plan.json").write_text(plan)
    if rows := list(rows):
        write_log(folder, rows)
    values = {"state": "done", "created": BEGAN, "attempt": 1, "started": BEGAN, "ended": BEGAN + 100, "exit_code": 0}
    write_status(folder, RunStatus.model_validate(values | status))
    return folder

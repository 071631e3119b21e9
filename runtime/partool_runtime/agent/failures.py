"""Detects failures that repeat over attempts without a step of progress, after which a restart does not help."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from partool.plan.record import DamagedRecordError
from partool.plan.run import lost_peer
from partool.plan.types import Plan
from partool.plan.validations import read_validations
from partool_runtime.agent.error_files import ErrorRecord
from partool_runtime.errors import FULL

FAILURES_FILE = "failures.jsonl"
_TAIL_BYTES = 1 << 18
_CHANGES = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|\d+")


def signature(what: str) -> str:
    """Return ``what``, the description of a failure, without addresses, ids and numbers, because these vary."""
    return _CHANGES.sub("N", what)[:500]


def is_lost_peer(error: ErrorRecord) -> bool:
    """Return True if a rank raised ``error`` because another rank had ended."""
    return error.exit_code == 1 and lost_peer(error.message)


class FailureLog:
    """The log of failed attempts, ``failures.jsonl`` in the run's folder; it is kept over restarts and requeues."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self._file = run_dir / FAILURES_FILE
        self._run_dir = run_dir
        self._plan_hash = plan.hash
        folder = plan.checkpoint.dir
        self._checkpoints = Path(folder) / run_dir.name if folder else run_dir / "checkpoints"

    @property
    def saved_step(self) -> int:
        """The step of the run's newest checkpoint; 0 if there is none."""
        return saved_step(self._checkpoints)

    @property
    def reached_step(self) -> int:
        """The last step that rank 0 noted or that has a checkpoint; rank 0 notes steps as often as it logs them."""
        return reached_step(self._run_dir, self._checkpoints)

    @property
    def saved_at(self) -> float | None:
        """Unix time at which the newest checkpoint was written; None if there is none."""
        step = self.saved_step
        try:
            return (self._checkpoints / f"step-{step:08}").stat().st_mtime if step else None
        except OSError:
            return None

    @property
    def ended_early(self) -> str:
        """Why a validation ended the run before its last step, in words; empty if none did, or nothing can be read."""
        try:
            return read_validations(self._checkpoints).ended
        except (DamagedRecordError, OSError):
            return ""

    def note(self, attempt: int, signature: str) -> int:
        """Record a failed attempt unless it was recorded before; returns how many alike failures came in a row.

        Failures are alike if they have the same signature and plan. A failure at a
        later step than the failures before it starts a new count, because training progressed in between.
        """
        entries = self._read()
        if not entries or entries[-1]["attempt"] != attempt:
            entry: dict[str, Any] = {
                "attempt": attempt,
                "time": time.time(),
                "signature": signature,
                "step": reached_step(self._run_dir, self._checkpoints),
                "plan_hash": self._plan_hash,
            }
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:
                if error.errno not in FULL:  # if the disk is full, only failures since this agent's start are counted
                    raise
            entries.append(entry)
        count, furthest = 0, -1
        before: tuple[str, str] | None = None
        for entry in entries:
            kind = (str(entry["signature"]), str(entry["plan_hash"]))
            count = count + 1 if kind == before and entry["step"] <= furthest else 1
            furthest = max(furthest, entry["step"]) if kind == before else entry["step"]
            before = kind
        return count

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            try:
                entries.append(json.loads(line))
            except ValueError:  # cut off as the machine went down
                continue
        return entries


def reached_step(run_dir: Path, checkpoints: Path) -> int:
    """Return the last step that rank 0 noted or that has a checkpoint, whichever is later; 0 if there is none."""
    return max(_last_event(run_dir / "events" / "rank-0.jsonl"), saved_step(checkpoints))


def saved_step(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint in a folder; 0 if there is none."""
    names = [entry.name for entry in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name)), default=0)


def _last_event(file: Path) -> int:
    try:
        with file.open("rb") as events:
            events.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            lines = events.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            event = json.loads(line)
            if event["kind"] == "step":
                return int(event["data"]["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0

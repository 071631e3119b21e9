"""The agent's watch over the progress of its ranks: the watchdog, the stacks, and the note about the last step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from partool.plan.progress import RunProgress, write_progress
from partool.plan.types import Plan
from partool_runtime.agent.pulses import Pulses
from partool_runtime.agent.stacks import process_state, stacks_folder, write_stacks
from partool_runtime.agent.standing import Standing
from partool_runtime.agent.watchdog import STOPPED, Stall, Watchdog
from partool_runtime.pulse import RankProgress

_NOTE_S = 2.0
"""Seconds between two writes of the note about the last step."""


class RankWatch:
    """Watches the ranks of this node, attempt after attempt.

    ``where`` is a text that names the node; empty in a run on one node. Only node 0 notes the progress of the run.
    """

    def __init__(self, plan: Plan, run_dir: Path, *, where: str = "", notes: bool = True) -> None:
        self.pulses = Pulses()
        self.standing: Standing | None = None
        """The rank of this node that is the furthest behind; None before the first look at an attempt."""
        self._setting = plan.launch.watchdog
        self._predicted_s = plan.prediction.upper_step_s
        self._run_dir = run_dir
        self._where = where
        self._notes = notes
        self._attempt = 0
        self._watchdog = Watchdog(self._setting, self._predicted_s)
        self._noted: RunProgress | None = None
        self._noted_at = -_NOTE_S
        self._written = False

    def begin_attempt(self, attempt: int) -> None:
        """Forget the previous attempt's ranks."""
        self._attempt = attempt
        self._watchdog = Watchdog(self._setting, self._predicted_s)
        self.standing = None
        self._noted = None
        self._written = False

    @property
    def patient(self) -> bool:
        """True if a rank of this node has not passed its limit, so that the others may be waiting for it."""
        return self._watchdog.patient

    def look(self, pids: Mapping[int, int], now: float) -> Stall | None:
        """Read the progress of the ranks, given the processes of those that run; return a stall if there is one."""
        progress = {rank: seen for rank, seen in self.pulses.progress().items() if rank in pids}
        if not progress:
            return None
        self._note(progress[min(progress)], now)
        states: dict[int, str] = {}
        stall = self._watchdog.observe(progress, now, lambda rank: states.setdefault(rank, process_state(pids[rank])))
        standings = [
            Standing(
                rank,
                seen.step,
                time.time() - self._watchdog.idle_s(rank, now),
                self._watchdog.stopped(rank),
                self._where,
            )
            for rank, seen in progress.items()
        ]
        self.standing = min(standings, key=lambda each: each.order)
        return stall

    def reason(self, stall: Stall, elsewhere: Standing | None) -> tuple[str, bool]:
        """Return why the ranks are ended, and whether the cause is ``elsewhere``: a rank of another node is behind."""
        if elsewhere is not None and self.standing is not None and elsewhere.order < self.standing.order:
            idle_s = max(0.0, time.time() - elsewhere.at)
            state = " and is stopped" if elsewhere.stopped else ""
            text = f"rank {elsewhere.rank}{elsewhere.where} made no progress for {idle_s:.0f} s{state}"
            return f"PT556: {text}, after step {elsewhere.step}", True
        seen = stall.progress
        doing = "in training" if seen.phase == "training" else f"while {seen.phase}"
        text = (
            f"rank {stall.rank}{self._where} made no progress for {stall.idle_s:.0f} s, {doing} after step {seen.step}"
        )
        if stall.state == STOPPED:
            text += "; its process is stopped (SIGSTOP)"
        return f"PT556: {text}", False

    def write_stacks(self, pids: Mapping[int, int]) -> Path:
        """Write the stacks of the ranks whose processes these are, once in an attempt; return their folder."""
        if self._written:
            return stacks_folder(self._run_dir, self._attempt)
        self._written = True
        return write_stacks(self._run_dir, self._attempt, pids, self.pulses)

    def close(self) -> None:
        """Release what is shared with the ranks."""
        self.pulses.close()

    def _note(self, seen: RankProgress, now: float) -> None:
        before = self._noted
        if not self._notes or (before is not None and now < self._noted_at + _NOTE_S):
            return
        phase_at = before.phase_at if before is not None and before.phase == seen.phase else time.time()
        note = RunProgress(
            attempt=self._attempt, step=seen.step, step_at=seen.step_at, phase=seen.phase, phase_at=phase_at
        )
        if note == before:
            return
        self._noted, self._noted_at = note, now
        with suppress(OSError):  # training can go on without this note
            write_progress(self._run_dir, note)

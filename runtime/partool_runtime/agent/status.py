"""The status of a run, which its agent writes."""

from __future__ import annotations

import time
from pathlib import Path

from partool.plan.run import STATUS_FILE, RunStatus, State, read_status, this_process, write_status
from partool.plan.terminal import say
from partool_runtime.errors import EXIT_DONE, EXIT_PREEMPTED, FULL

_STATES: dict[int, State] = {EXIT_DONE: "done", EXIT_PREEMPTED: "preempted"}


class StatusKeeper:
    """Writes the run's status while its agent runs."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        try:
            before = read_status(run_dir)
        except FileNotFoundError:
            before = RunStatus(state="starting", created=time.time())
        now = {"started": time.time(), "ended": None, "exit_code": None, "reason": ""}
        self.status = before
        self._write(state="starting", **now, **this_process())

    def next_attempt(self) -> int:
        """Note that the ranks are being started (again); returns the number of this attempt, from 1."""
        self._write(state="running", attempt=self.status.attempt + 1)
        return self.status.attempt

    def end(self, exit_code: int, reason: str) -> None:
        """Record how the run ended."""
        self._write(state=_STATES.get(exit_code, "failed"), exit_code=exit_code, reason=reason, ended=time.time())

    def _write(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)
        try:
            write_status(self._run_dir, self.status)
        except OSError as error:
            if error.errno not in FULL:
                raise
            text = f"{self._run_dir / STATUS_FILE} cannot say that the run is {self.status.state}: {error.strerror}"
            say(f"partool: {text}", err=True)

"""What the agent says when it starts its ranks again, and how to go on when it does not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from partool.plan.run import agent_log
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool_runtime.agent.failures import FailureLog
from partool_runtime.agent.status import StatusKeeper


class Restarts:
    """Numbers the attempts of one agent, and tells of every one but the first why it is made."""

    def __init__(self, plan: Plan, run_dir: Path, keeper: StatusKeeper, failures: FailureLog) -> None:
        self._run_dir, self._keeper, self._failures = run_dir, keeper, failures
        self._launch = plan.launch
        self._last = 0
        self.reason = ""
        """Why the attempt before has failed, in one line."""

    def next_attempt(self) -> int:
        """Note that the ranks are being started; returns the number of this attempt."""
        attempt = self._keeper.next_attempt()
        if self._last:
            where = f"goes on from step {step}" if (step := self._failures.saved_step) else "begins anew"
            self._say(attempt, f"{self.reason}; attempt {attempt} of {self._last} {where}")
        else:
            self._last = attempt + self._launch.restarts
        return attempt

    def _say(self, attempt: int, what: str) -> None:
        """Write a line on standard error, and where the logs of the attempt that follows are."""
        with contextlib.suppress(OSError):  # the terminal may have been closed
            say(f"partool: {what}", err=True)
        file = agent_log(self._run_dir, attempt)
        with contextlib.suppress(OSError):  # no reason not to go on
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"partool: {what}\n", encoding="utf-8")

    def help(self, *, asked: bool = False) -> str:
        """Return how a run that has failed, or was ``asked`` to stop, may go on; empty where a scheduler sees to it."""
        if self._launch.target != "local":
            return ""
        step, ways = self._failures.saved_step, []
        if step:
            ways.append(f"partool launch --resume {self._run_dir.name} goes on from step {step}")
        elif asked:
            ways.append("there is no checkpoint: a new start begins anew")
        if not self._launch.restarts and not asked:
            ways.append("with launch: {restarts: 1} the agent starts the ranks again by itself")
        return f"  help: {'; '.join(ways)}" if ways else ""

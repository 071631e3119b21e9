"""Where runs are sent: what every kind of target can do."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from partool.launch.store import Run
from partool.plan.run import RunStatus
from partool.plan.types import Plan


class LaunchError(Exception):
    """A run could not be started; ``exit_code`` is the command's (3 environment, 4 submission)."""

    def __init__(self, code: str, message: str, help: str = "", exit_code: int = 4) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.help = help
        self.exit_code = exit_code


class Target(Protocol):
    """A place where runs run."""

    def check(self) -> None:
        """Raise LaunchError if nothing can be launched there from here."""
        ...

    def describe(self, plan: Plan, run: Run | None, *, resume: bool, step: int | None = None) -> str:
        """Return exactly what :meth:`launch` would run, as text; ``run`` is None where it would make one.

        With ``step`` the checkpoints after it, which are set aside first, are named too.
        """
        ...

    def launch(self, run: Run, plan: Plan, *, resume: bool, detach: bool) -> int | None:
        """Start the run; returns the agent's exit code, or None if it goes on by itself. Raises LaunchError."""
        ...

    def status(self, run: Run) -> RunStatus:
        """Return how the run is doing."""
        ...

    def cancel(self, run: Run, *, now: bool) -> bool:
        """Ask the run to checkpoint and stop, or to stop at once; returns False if it has ended already."""
        ...

    def logs(self, run: Run, attempt: int) -> dict[int, tuple[Path, Path]]:
        """Return the files with standard output and standard error of an attempt's ranks, by rank."""
        ...

"""Where runs are sent: what every kind of target can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from partool.diagnostics.record import Diagnostic
from partool.launch.store import Run
from partool.plan.run import RunStatus
from partool.plan.types import Plan
from partool.render import Job, Rendered


class LaunchError(Exception):
    """A run could not be started; ``exit_code`` is the command's (3 environment, 4 submission)."""

    def __init__(self, code: str, message: str, help: str = "", exit_code: int = 4) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.help = help
        self.exit_code = exit_code


class LogLine(NamedTuple):
    """A line that a rank, or the agent of a node, wrote."""

    rank: int | None
    """None: not a rank's own, but an agent's or a scheduler's."""
    is_error: bool
    """Standard error."""
    text: bytes
    """With its line end, where it has one."""
    task: int | None = None
    """Of an array whose tasks are shown together."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines."""

    rank: int | None = None
    """None: of all ranks, merged."""
    attempt: int | None = None
    """None: the latest."""
    follow: bool = False
    """Go on until the run ends, over restarts if no attempt is given."""
    task: int | None = None
    """Of an array; None: of all tasks."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of validation of what would be submitted."""

    name: str
    """``own rules``, ``core schemas``, ``sbatch --test-only``, ``server-side dry run``..."""
    ran: bool
    note: str = ""
    """What it was checked against, or why it did not run."""
    findings: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of ``partool doctor``."""

    name: str
    verdict: Literal["ok", "warning", "failed", "skipped"]
    text: str
    help: str = ""


@dataclass(frozen=True, slots=True)
class DoctorFiles:
    """Files that the user gives ``partool doctor`` beside a plan."""

    script: str | None = None
    """Text of a job script of the user's, for targets whose jobs are scripts."""
    crds: Path | None = None
    """Folder with definitions of a Kubernetes cluster."""


def level_of(name: str, checks: Iterable[Check]) -> Level:
    """Return what doctor's checks of a plan found as a level of validation; raises LaunchError as they do."""
    ran = [check for check in checks if check.verdict != "skipped"]
    found = [
        Diagnostic(
            "PT560",
            f"{check.name}: {check.text}",
            severity="error" if check.verdict == "failed" else "warning",
            help=check.help,
        )
        for check in ran
        if check.verdict != "ok"
    ]
    return Level(name, True, f"{len(ran)} checks", tuple(found))


class NoLogsError(LookupError):
    """There is no such log; the message says what there is."""


class Target(Protocol):
    """A place where runs run: everything about a run that has been started."""

    def status(self, run: Run) -> RunStatus:
        """Return how the run is doing; raises LaunchError (exit code 3) where the place cannot be asked."""
        ...

    def cancel(self, run: Run, *, now: bool) -> bool:
        """Ask the run to checkpoint and stop, or to stop at once; returns False if it has ended already."""
        ...

    def logs(self, run: Run, query: LogQuery) -> Iterator[LogLine]:
        """Yield lines of the ranks' output; raises NoLogsError."""
        ...

    def errors(self, run: Run) -> str:
        """Return the error records of all ranks as text, in the order in which they happened; empty if none."""
        ...


class ClusterTarget(Target, Protocol):
    """A place with a scheduler."""

    def check(self, plan: Plan) -> None:
        """Raise LaunchError if nothing can be submitted from here."""
        ...

    def withdraw(self, run: Run, details: dict[str, str]) -> None:
        """Take back what :meth:`submit` has just submitted, by what it returned; raises LaunchError."""
        ...

    def statuses(self, runs: Sequence[Run]) -> dict[str, RunStatus]:
        """Return the status of several runs by id, asking the scheduler as seldom as possible."""
        ...

    def validate(
        self, job: Job, rendered: Rendered, *, crds: Path | None = None, offline: bool = False
    ) -> Sequence[Level]:
        """Check what would be submitted, submitting nothing: with what is here, and by asking the real thing.

        Returns one level at least. ``crds`` is a folder of definitions of a Kubernetes cluster. The scheduler's word
        comes last; ``offline`` leaves it out.
        """
        ...

    def submit(self, run: Run, job: Job, rendered: Rendered) -> dict[str, str]:
        """Submit; returns what :meth:`status` needs to find it again (``job_id``, ``namespace``...).

        The run's folder holds the rendered files already. Raises LaunchError, after which nothing is left on the
        cluster.
        """
        ...

    def remove(self, run: Run) -> None:
        """Delete what is left on the cluster of a run that has ended, so that it can be submitted again."""
        ...

    def diff(self, job: Job, rendered: Rendered) -> str:
        """Return how the rendered text differs from what is on the cluster, as a unified diff; empty if not at all."""
        ...

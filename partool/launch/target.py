"""Interface of targets, the places where runs are executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from partool.diagnostics.record import CodedError, Diagnostic
from partool.launch.store import Run
from partool.plan.run import RunStatus
from partool.plan.types import Plan
from partool.render.job import Job, Rendered


class LaunchError(CodedError):
    """A run could not be started; ``exit_code`` is the exit code of the command (3 environment, 4 submission)."""

    def __init__(self, code: str, message: str, help: str = "", exit_code: int = 4) -> None:
        super().__init__(code, message, help)
        self.exit_code = exit_code


class LogLine(NamedTuple):
    """A line that a rank, or the agent of a node, wrote."""

    rank: int | None
    """Rank; None for a line of an agent or of a scheduler."""
    is_error: bool
    """True if the line was written to standard error."""
    text: bytes
    """Text of the line, with the line end if there is one."""
    task: int | None = None
    """Number of the array task that wrote the line, if tasks are shown together; else None."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Criteria that select log lines."""

    rank: int | None = None
    """Rank; None selects all ranks, merged."""
    attempt: int | None = None
    """Number of the attempt; None selects the latest attempt."""
    follow: bool = False
    """True to read until the run ends and, unless ``attempt`` selects one attempt, to read later attempts too."""
    task: int | None = None
    """Number of the array task; None selects all tasks."""


@dataclass(frozen=True, slots=True)
class Level:
    """Result of one level of a job's validation, such as the check against schemas."""

    name: str
    """``own rules``, ``core schemas``, ``sbatch --test-only``, ``server-side dry run``..."""
    ran: bool
    note: str = ""
    """What the level compared the job with, or why the level did not run."""
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
    """Files that the user gives ``partool doctor`` in addition to a plan."""

    script: str | None = None
    """Text of a job script that the user wrote, for targets whose jobs are scripts."""
    crds: Path | None = None
    """Folder with a Kubernetes cluster's definitions (CRDs)."""


def level_of(name: str, checks: Iterable[Check]) -> Level:
    """Return ``checks``, doctor's checks of a plan, as a level of validation; raises LaunchError if a check does."""
    ran = [check for check in checks if check.verdict != "skipped"]
    findings = [
        Diagnostic(
            "PT560",
            f"doctor's check `{check.name}`: {check.text}",
            severity="error" if check.verdict == "failed" else "warning",
            help=check.help,
        )
        for check in ran
        if check.verdict != "ok"
    ]
    return Level(name, True, f"{len(ran)} checks", tuple(findings))


class NoLogsError(LookupError):
    """The requested log does not exist; the message lists the existing logs."""


class Target(Protocol):
    """A place where runs are executed, with the operations on a run that has been started."""

    def status(self, run: Run) -> RunStatus:
        """Return the status of the run; raises LaunchError (exit code 3) if the place does not answer."""
        ...

    def cancel(self, run: Run, *, now: bool) -> bool:
        """Ask the run to checkpoint and stop, or with ``now`` to stop at once; returns False if the run has ended."""
        ...

    def logs(self, run: Run, query: LogQuery) -> Iterator[LogLine]:
        """Yield lines of the ranks' output; raises NoLogsError."""
        ...

    def errors(self, run: Run) -> str:
        """Return the error records of all ranks as text, in the order in which they happened; empty without errors."""
        ...


class ClusterTarget(Target, Protocol):
    """A target with a scheduler, such as a Slurm cluster."""

    def check(self, plan: Plan) -> None:
        """Raise LaunchError if jobs cannot be submitted from here."""
        ...

    def withdraw(self, run: Run, details: dict[str, str]) -> None:
        """Undo a submission that just succeeded; ``details`` is what :meth:`submit` returned. Raises LaunchError."""
        ...

    def statuses(self, runs: Sequence[Run]) -> dict[str, RunStatus]:
        """Return the status of several runs, by run id, with as few requests to the scheduler as possible."""
        ...

    def validate(
        self, job: Job, rendered: Rendered, *, crds: Path | None = None, offline: bool = False
    ) -> Sequence[Level]:
        """Check a job without submitting it: with local checks, then with the scheduler's checks.

        Returns at least one level. ``crds`` is a folder with a Kubernetes cluster's definitions. The scheduler's level
        comes last; with ``offline`` it is left out.
        """
        ...

    def submit(self, run: Run, job: Job, rendered: Rendered) -> dict[str, str]:
        """Submit the job; returns the data by which :meth:`status` finds the job again (``job_id``, ``namespace``...).

        The run's folder already holds the rendered files. If the submission raises LaunchError, nothing is left on the
        cluster.
        """
        ...

    def remove(self, run: Run) -> None:
        """Delete a finished run's leftovers on the cluster, so that the run can be submitted again."""
        ...

    def diff(self, job: Job, rendered: Rendered) -> str:
        """Return the unified diff from the cluster's state to the rendered text; empty if nothing differs."""
        ...

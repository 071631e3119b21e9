"""Errors that decide how a rank ends, and the exit codes of ranks and agent."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_PREEMPTED = 75
"""Exit code of a run stopped on request after a checkpoint; ``--resume`` continues it (EX_TEMPFAIL of sysexits.h)."""
EXIT_CONFIGURATION = 78
"""Exit code of a run that would fail again at every retry, so it is never retried (EX_CONFIG of sysexits.h)."""


_LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.ENOEXEC, errno.ELOOP, errno.ENAMETOOLONG}
)
"""Error numbers of the operating system that would recur at another start; a full disk is not included, for example."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers for a full file system and for an exhausted disk quota of the user."""


class ConfigurationError(Exception):
    """An error in the spec, in the plan or in files named by the spec or plan; a retry does not fix the error.

    ``code`` is a rule code such as PT601, ``message`` the error, ``help`` the nearest alternative that works.
    """

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__(code, message, help)
        self.code = code
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f"\n  help: {self.help}" if self.help else "")


class CheckpointError(Exception):
    """A checkpoint could not be written or read for a reason that may be temporary: a lost peer or an I/O error."""


class Preempted(Exception):  # noqa: N818 - not an error
    """The run was asked to stop and has written its checkpoint."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that ends with ``error``."""
    if isinstance(error, Preempted):
        return EXIT_PREEMPTED
    if isinstance(error, ConfigurationError):
        return EXIT_CONFIGURATION
    return EXIT_FAILED


@contextmanager
def lasting_refusals(run_dir: Path) -> Iterator[None]:
    """Raise ConfigurationError in place of an operating system error that would recur at another start.

    The code is PT512 if the error concerns the run's folder, PT507 if it concerns anything else that ranks need to
    start.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _LASTING:
            raise
        path, why = Path(str(error.filename or "")), error.strerror or type(error).__name__
        if path in (run_dir, *run_dir.parents) or run_dir in path.parents:
            fix = "let the user of the ranks write there (Kubernetes: launch.k8s.user), or keep runs elsewhere"
            raise ConfigurationError("PT512", f"{path} cannot be written: {why}", fix) from error
        what = f"{path}: {why}" if error.filename else str(error)
        raise ConfigurationError("PT507", f"the ranks cannot be started: {what}", "mend that where they run") from error

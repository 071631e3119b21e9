"""Errors that decide how a rank ends, and the exit codes of ranks and agent."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_PREEMPTED = 75
"""Stopped on request after a checkpoint: start again with ``--resume`` (EX_TEMPFAIL of sysexits.h)."""
EXIT_CONFIGURATION = 78
"""Would fail the same way every time: never retry (EX_CONFIG of sysexits.h)."""


class ConfigurationError(Exception):
    """Something in the spec, the plan or the files they name that no retry mends.

    ``code`` is a rule code such as PT601, ``message`` what is wrong, ``help`` the nearest thing that works.
    """

    def __init__(self, code: str, message: str, help: str = "") -> None:
        super().__init__(code, message, help)
        self.code = code
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f"\n  help: {self.help}" if self.help else "")


class Preempted(Exception):  # noqa: N818 - not an error
    """The run was asked to stop and has written its checkpoint."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that ends with this error."""
    if isinstance(error, Preempted):
        return EXIT_PREEMPTED
    if isinstance(error, ConfigurationError):
        return EXIT_CONFIGURATION
    return EXIT_FAILED

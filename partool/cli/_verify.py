"""The dry run of a plan's code, for ``plan --verify`` and ``launch --dry-run --deep``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from partool.catalog.transformers_process import code_allowed
from partool.cli._fail import fail
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.plan.verification import RANK_LIMIT_S, WARNINGS
from partool.strategies.jobs import JOBS

if TYPE_CHECKING:
    from partool.verify import DryProgress, DryRunError

__all__ = ["RANK_LIMIT_S", "RankLimit", "exit_on_error", "exit_on_faults", "say_verified", "verified_plan"]

_ERRORS, _ENVIRONMENT = 1, 3
_OF_THIS_MACHINE = frozenset({"PT516"})
"""Codes of errors that say nothing about the plan."""
RankLimit = Annotated[
    float, typer.Option("--rank-limit", min=1.0, help="Seconds that the dry run of one rank may take.")
]


def verified_plan(plan: Plan, limit_s: float) -> tuple[Plan, DryRunError | None]:
    """Return the plan with its verification; without it, and with the error, if a dry run fails.

    Ends the command if the runtime cannot run the plan, or may not run its code.
    """
    from partool.cli._watch import live_line
    from partool.verify import DryProgress, DryRunError, verified

    if plan.code and not code_allowed():
        message = f"the plan builds its model with code from {plan.code}, which runs only if you allow it"
        fail("PT590", message, "read that code; if you trust it, give --trust-remote-code on the command line", _ERRORS)
    if not JOBS[plan.job].backward:
        fail("PT290", f"dry runs execute steps of training; job: {plan.job} has none", "plan without --verify", _ERRORS)
    if not plan.runnable:
        codes = " ".join(plan.not_runnable)
        fail("PT505", f"the runtime cannot run this plan yet ({codes})", f"partool explain {codes}", _ERRORS)
    progress = DryProgress()
    try:
        with live_line(lambda seconds: _line(progress, seconds), sys.stderr):
            return verified(plan, lambda line: say(f"partool: {line}", err=True), progress, limit_s), None
    except DryRunError as error:
        return plan, error


def _line(progress: DryProgress, seconds: float) -> str:
    """Return one line that says how many ranks are done, and which run."""
    running = f", running: rank {', '.join(map(str, progress.running))}" if progress.running else ""
    return f"partool: {seconds:.0f} s, {progress.finished} of {progress.ranks} ranks done{running}"


def exit_on_error(error: DryRunError | None) -> None:
    """End the command with the error of a dry run that failed or cannot be made."""
    if error is not None:
        places = f"; see {', '.join(error.places)}" if error.places else ""
        exit_code = _ENVIRONMENT if error.code in _OF_THIS_MACHINE else _ERRORS
        fail(error.code, error.message, f"{error.help}{places}", exit_code)


def exit_on_faults(plan: Plan, *, strict: bool = False) -> None:
    """End the command with an error if the dry run that a plan holds found a fault, or more memory than there is.

    With ``strict`` warnings count as faults.
    """
    verification = plan.verification
    if verification is None:
        return
    if faults := [each for each in verification.findings if strict or each.code not in WARNINGS]:
        one = faults[0]
        places = f"; see {', '.join(one.places)}" if one.places else ""
        fail(one.code, one.message, f"partool explain {one.code}{places}", _ERRORS)
    memory = plan.prediction.memory
    if memory.verdict == "red":
        share = memory.total_bytes / plan.devices.memory_bytes
        message = f"rank {memory.rank} does not fit: by its dry run it needs {share:.0%} of the device's memory"
        help = "smaller micro-batches, recompute, more shards, or leave parallel to the planner"
        fail("PT599", message, help, _ERRORS)


def say_verified(plan: Plan) -> None:
    """Print the section on the dry run alone."""
    from partool.cli._files import printing
    from partool.report.verification import render_verification

    with printing() as console:
        render_verification(plan, console)

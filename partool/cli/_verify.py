"""The dry run of a plan's code, for ``plan --verify`` and ``launch --dry-run --deep``."""

from __future__ import annotations

from partool.catalog.transformers_process import code_allowed
from partool.cli._fail import fail
from partool.plan.terminal import say
from partool.plan.types import Plan

_ERRORS = 1


def verified_or_exit(plan: Plan) -> Plan:
    """Return the plan with its verification; ends the command if the plan cannot run, or a dry run fails."""
    from partool.verify import DryRunError, verified

    if plan.hf is not None and plan.hf.code_hash and not code_allowed():
        message = f"the plan builds its model with code from {plan.hf.path}, which runs only if you allow it"
        fail("PT590", message, "read that code; if you trust it, give --trust-remote-code on the command line", _ERRORS)
    if not plan.runnable:
        codes = " ".join(plan.not_runnable)
        fail("PT505", f"the runtime cannot run this plan yet ({codes})", f"partool explain {codes}", _ERRORS)
    try:
        return verified(plan, lambda line: say(f"partool: {line}", err=True))
    except DryRunError as error:
        fail(error.code, error.message, error.help, _ERRORS)


def exit_on_faults(plan: Plan) -> None:
    """End the command with an error if the dry run that a plan holds found a fault, or more memory than there is."""
    found = plan.verification
    if found is None:
        return
    if found.findings:
        one = found.findings[0]
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

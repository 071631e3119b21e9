"""Checks that limits of the launch section leave a run the time that it needs: for steps, and to save its state."""

from __future__ import annotations

import math
from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.spec.launch import LaunchSpec
from partool.spec.targets.rules import Forecast, rules_of

_LEAST_STEPS = 3


def check_restarts(plan: Plan) -> Iterator[Diagnostic]:
    """Note that a restart begins at step 0 where ``checkpoint.every: auto`` writes no checkpoint before the end.

    A written 0 is a warning of :mod:`partool.spec.checks`.
    """
    written = plan.spec.get("checkpoint", {})
    decided = not isinstance(written, dict) or written.get("every", "auto") == "auto"
    if decided and plan.checkpoint.every == 0 and plan.launch.restarts and plan.engine == "partool":
        message = f"restarts: {plan.launch.restarts}, and a run this short writes no checkpoint before its end"
        help = "a restart begins at step 0; checkpoint: {every: 10min} limits what it repeats"
        yield Diagnostic("PT227", message, severity="note", path=("launch", "restarts"), help=help)


def check_window(launch: LaunchSpec, expected: Forecast) -> Iterator[Diagnostic]:
    """Warn if ``launch.shutdown_timeout_s`` is shorter than a step and a checkpoint may take."""
    longest_s = rules_of(launch.target).longest_window_s(launch)
    window_s = launch.window_s
    if window_s >= expected.stop_s or window_s == longest_s:  # rules of the target tell why they allow no more
        return
    message = f"shutdown_timeout_s: {window_s} is shorter than a stop may take: {expected.stop_words}"
    help = f"write auto, or {expected.window_s} or more; as it is, a stop can lose {expected.loss}"
    yield Diagnostic("PT340", message, severity="warning", path=("launch", "shutdown_timeout_s"), help=help)


def check_watchdog(launch: LaunchSpec, upper_step_s: float) -> list[Diagnostic]:
    """Return a warning if the watchdog would end healthy ranks; ``upper_step_s`` is the step at its upper error bar."""
    limit, least_s = launch.watchdog, _LEAST_STEPS * upper_step_s
    if not isinstance(limit, int) or limit >= least_s:
        return []
    message = f"watchdog: {limit} s is shorter than {_LEAST_STEPS} steps, which take up to {least_s:.0f} s"
    help = f"use {math.ceil(least_s) + 60} or more, or auto, which follows the steps that are measured"
    return [Diagnostic("PT555", message, severity="warning", path=("launch", "watchdog"), help=help)]


def check_decided(launch: LaunchSpec, expected: Forecast) -> list[Diagnostic]:
    """Return findings about a section without errors whose open values the plan has decided."""
    return [*rules_of(launch.target).errors(launch), *check_duration(launch, expected)]


def check_duration(launch: LaunchSpec, expected: Forecast) -> list[Diagnostic]:
    """Return findings about time limits of the launch section, and about the time that it gives a run to stop."""
    return [*check_window(launch, expected), *rules_of(launch.target).about_duration(launch, expected)]

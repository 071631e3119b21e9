"""Checks that a stopped run gets the time that it needs to save its state."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.spec.launch import LaunchSpec
from partool.spec.targets.rules import Forecast, rules_of


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

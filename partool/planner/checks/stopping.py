"""Checks that a stopped run gets the time that it needs to save its state."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.launch import LaunchSpec
from partool.spec.targets.rules import Forecast, rules_of


def check_window(launch: LaunchSpec, expected: Forecast) -> Iterator[Diagnostic]:
    """Warn if ``launch.shutdown_timeout_s`` is shorter than a step and a checkpoint may take."""
    longest_s = rules_of(launch.target).longest_window_s(launch)
    window_s = launch.window_s
    if window_s >= expected.stop_s or window_s == longest_s:  # rules of the target tell why they allow no more
        return
    message = f"shutdown_timeout_s: {window_s} is shorter than a stop may take: {expected.stop_words}"
    help = f"write auto, or {expected.window_s} or more; as it is, a stop can lose {expected.loss}"
    yield Diagnostic("PT340", message, severity="warning", path=("launch", "shutdown_timeout_s"), help=help)

"""Compares the time that a cluster gives a preempted job with the time that the plan's run needs to save its state."""

from __future__ import annotations

import re
from collections.abc import Iterator

from partool.launch.target import Check
from partool.plan.types import Plan
from partool.planner.stopping import forecast

_KILL_WAIT_S = 30
"""Slurm's default of KillWait (slurm.conf(5))."""


def grace_checks(plan: Plan, config: dict[str, str], partition: dict[str, str]) -> Iterator[Check]:
    """Check whether a preempted job of ``partition`` has time for a step and a checkpoint; nothing without preemption.

    ``config`` is from ``scontrol show config``, ``partition`` a record of ``scontrol show partition``. A preempted job
    has the partition's GraceTime; where that is 0, it has KillWait between SIGTERM and SIGKILL (slurm.conf(5)).
    """
    kind = config.get("PreemptType", "").rpartition("/")[2]
    modes = config.get("PreemptMode", ""), partition.get("PreemptMode", "")
    if kind in ("", "none", "(null)") or "OFF" in modes:
        return
    grace_s = _seconds(partition.get("GraceTime", ""))
    field, given_s = ("GraceTime", grace_s) if grace_s else ("KillWait", _seconds(config.get("KillWait", "")))
    expected = forecast(plan)
    text = f"a preempted job has {given_s or _KILL_WAIT_S} s ({field})"
    if (given_s or _KILL_WAIT_S) >= expected.stop_s:
        yield Check("grace", "ok", f"{text}, a step and its checkpoint may take {expected.stop_s} s")
        return
    text += f", and a stop may take {expected.stop_s} s: {expected.stop_words}"
    help = (
        f"each preemption can lose {expected.loss}: a shorter checkpoint.every loses less, or ask for a GraceTime of "
        f"{expected.window_s}"
    )
    yield Check("grace", "warning", text, help)


def _seconds(text: str) -> int:
    """Return the number at the beginning of a setting such as ``30 sec``; 0 if there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0

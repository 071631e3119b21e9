"""Decides how long a stopped run may take to save its state, and how often a run saves it meanwhile."""

from __future__ import annotations

import math
from typing import Any

from partool.plan.stopping import Stopping
from partool.plan.types import Plan
from partool.spec.hardware import Devices
from partool.spec.launch import SHORTEST_WINDOW_S, LaunchSpec
from partool.spec.numbers import GIB, MIB
from partool.spec.targets.rules import Forecast, rules_of
from partool.strategies.jobs import JOBS
from partool.strategies.optimizers import OPTIMIZERS

LONG_RUN_S = 3600.0
"""Predicted seconds of a run above which ``checkpoint.every: auto`` writes checkpoints before the end."""
EVERY_OF_LONG_RUNS = "30min"
_ROUNDED_TO_S = 30
_MOST_S = 100_000_000
"""Upper limit of :data:`partool.spec.numbers.Seconds`."""
_MOST_RATE = 1e30
_AFTER_AGREEMENT = ("optimizer", "offload")
"""Time terms of the part of a step that follows the ranks' agreement about stopping. A signal that arrives in this part
takes effect at the end of the next step."""


def decided(plan: Plan) -> Plan:
    """Return the plan with values for ``launch.shutdown_timeout_s`` and ``checkpoint.every``, and their derivation.

    Values that the spec gives stay; ``plan.spec`` keeps what the user wrote. Stops of other training systems are their
    own: their plans have no derivation.
    """
    every = _asked(plan, "checkpoint", "every")
    if plan.engine != "partool":
        every = 0 if every == "auto" else every
    elif every == "auto" and JOBS[plan.job].backward:
        every = EVERY_OF_LONG_RUNS if plan.prediction.time.total_s > LONG_RUN_S else 0
    plan = plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"every": every})})
    if plan.engine != "partool":
        return plan.model_copy(update={"launch": _with_window(plan, SHORTEST_WINDOW_S)})
    stopping = stopping_of(plan)
    longest_s = rules_of(plan.launch.target).longest_window_s(plan.launch)
    window_s = roomy_s(stopping.needed_s)
    window_s = window_s if longest_s is None else min(window_s, longest_s)
    return plan.model_copy(update={"stopping": stopping, "launch": _with_window(plan, window_s)})


def stopping_of(plan: Plan) -> Stopping:
    """Return the time that a stop needs until its checkpoint is complete.

    A signal may come as a step begins, and takes effect as the step ends. A checkpoint that is being written in the
    background is completed before the next one. Validation stops between micro-batches, and before an attempt's first
    step, which compiles, there is nothing to save: neither takes longer than a step.
    """
    time, steps = plan.prediction.time, 1
    if OPTIMIZERS[plan.optimizer.name].whole_steps:
        steps = plan.optimizer.one_bit.local_most
    rest_s = sum(time.terms_s.get(name, 0.0) for name in _AFTER_AGREEMENT)
    step_s = min((1.0 + plan.prediction.relative_error) * (steps * time.step_time_s + rest_s), _MOST_RATE)
    size = plan.prediction.memory.saved_bytes * plan.devices.per_node
    if plan.devices.nodes == 1 and plan.prediction.totals is not None:  # the ranks of one node write it all
        size = plan.prediction.totals.checkpoint_bytes
    write_s = size / plan.devices.storage_bytes_per_s
    in_background = plan.checkpoint.mode == "async" and plan.layout.offload.optimizer != "nvme"
    writes = 2 if in_background and plan.checkpoint.every not in (0, "auto") else 1
    needed_s = math.ceil(min(step_s + writes * write_s, _MOST_S))
    return Stopping(
        steps=steps,
        step_s=step_s,
        checkpoint_bytes=size,
        write_s=min(write_s, _MOST_RATE),
        writes=writes,
        needed_s=max(needed_s, 1),
    )


def roomy_s(needed_s: int) -> int:
    """Return the time that a plan gives a stop that needs ``needed_s``: rounded up to half a minute, at least 60 s."""
    return min(max(math.ceil(needed_s / _ROUNDED_TO_S) * _ROUNDED_TO_S, SHORTEST_WINDOW_S), _MOST_S)


def forecast(plan: Plan) -> Forecast:
    """Return the predictions that rules about time limits and stops compare with; plans of older versions hold none."""
    every = plan.checkpoint.every
    if plan.engine != "partool":
        return Forecast(plan.prediction.time.total_s, 0, SHORTEST_WINDOW_S, "", saves=True, loss="")
    stopping = plan.stopping or stopping_of(plan)
    return Forecast(
        total_s=plan.prediction.time.total_s,
        stop_s=stopping.needed_s,
        window_s=roomy_s(stopping.needed_s),
        stop_words=in_words(plan, stopping),
        saves=every not in (0, "auto") or not JOBS[plan.job].backward,
        loss=worst_loss(every if JOBS[plan.job].backward else plan.training.log_every),
    )


def in_words(plan: Plan, stopping: Stopping) -> str:
    """Return the parts of the time that a stop needs: ``a step 97 s, a checkpoint of 107 GiB per node 2 × 115 s``..."""
    steps = "a step" if stopping.steps == 1 else f"{stopping.steps} steps"
    rate = f"{plan.devices.storage_bytes_per_s / 1e9:.3g} GB/s{_origin(plan)}"
    size = f"{_size(stopping.checkpoint_bytes)} per node"
    times = "" if stopping.writes == 1 else f"{stopping.writes} × "  # one may be in the background
    return f"{steps} {_s(stopping.step_s)}, a checkpoint of {size} {times}{_s(stopping.write_s)} at {rate}"


def _origin(plan: Plan) -> str:
    """Return words after the rate of the storage if a calibration measured it; a plan's spec has a rate of its own."""
    if _asked(plan, "hardware", "storage_gb_per_s") != "auto":
        return ""
    assumed = Devices.model_fields["storage_bytes_per_s"].default
    return "" if plan.devices.storage_bytes_per_s == assumed else " (partool calibrate)"


def worst_loss(every: int | str) -> str:
    """Return what a run loses at most that ends without a new checkpoint, for ``checkpoint.every``."""
    if every in (0, "auto"):
        return "all steps of the attempt: no checkpoint is written before its end"
    return f"up to {every} of training" if isinstance(every, str) else f"up to {every} steps"


def _with_window(plan: Plan, window_s: int) -> LaunchSpec:
    """Return the launch section with ``window_s`` as its time for a checkpoint, unless the user wrote one."""
    if _asked(plan, "launch", "shutdown_timeout_s") != "auto":
        return plan.launch
    return plan.launch.model_copy(update={"shutdown_timeout_s": window_s})


def _asked(plan: Plan, section: str, field: str) -> Any:
    """Return the value that the user wrote for a field, ``auto`` if none."""
    written = plan.spec.get(section, {})
    return written.get(field, "auto") if isinstance(written, dict) else "auto"


def _size(count: int) -> str:
    return f"{count / MIB:.3g} MiB" if count < GIB / 10 else f"{count / GIB:,.3g} GiB"


def _s(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1 else "under 1 s"

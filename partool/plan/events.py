"""Schema of the events that every rank appends to ``events/rank-N.jsonl`` of its run."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

EVENT_VERSION = 1

EventKind = Literal[
    "start",  # attempt, world_size, plan_hash, resumed_from
    "step",  # step, loss, grad_norm, lr, tokens, step_time_s, terms_s, tokens_per_s, mfu, memory_bytes, skipped
    "pipeline",  # step, steady, t, actions, start_us, stop_us, waited_us: see partool.plan.pipeline_log
    "validation",  # step, loss, tokens
    "checkpoint",  # step, path, write_s, blocked_s
    "offload",  # of the whole attempt: what partool_runtime.offload.figures.Figures counts
    "nonfinite",  # step, consecutive
    "signal",  # name
    "warning",  # message
    "summary",  # predicted, measured and measure of every term
    "error",  # type, message, traceback
    "end",  # step, exit_code, reason
]


class Event(TypedDict):
    """One line of the log."""

    v: int
    kind: EventKind
    t: float
    """Unix time in seconds."""
    rank: int
    data: dict[str, Any]

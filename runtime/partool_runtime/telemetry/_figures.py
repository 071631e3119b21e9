"""Figures on the console, and the format of numbers there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """The latest state of the training, over all ranks unless stated otherwise."""

    step: int
    total_steps: int
    loss: float | None = None
    multi_token_loss: float | None = None
    """Mean loss of predictions of further tokens; None for a model without."""
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    memory_bytes: int | None = None
    """Peak memory of this rank."""
    mfu: float | None = None
    eta_s: float | None = None
    skipped: bool = False
    preferences: Mapping[str, float] | None = None
    """Means over pairs of answers since the last log step; None for other objectives."""
    kl: float | None = None
    """Mean divergence of a teacher from the model since the last log step, in nats per token; None without one."""


def line(figures: TrainingFigures) -> str:
    """Return the known figures in one line."""
    width = len(str(figures.total_steps))
    parts = [f"step {figures.step:>{width}}/{figures.total_steps}", *(f"{k} {v}" for k, v in pairs(figures))]
    return "  ".join(parts) + ("  skipped: gradient not finite" if figures.skipped else "")


def pairs(figures: TrainingFigures) -> list[tuple[str, str]]:
    """Return the known figures as (name, text)."""
    f = figures
    texts = [
        ("loss", None if f.loss is None else f"{f.loss:.4f}"),
        ("KL of teacher", None if f.kl is None else f"{f.kl:.4f}"),
        ("further tokens", None if f.multi_token_loss is None else f"{f.multi_token_loss:.4f}"),
        ("grad norm", None if f.grad_norm is None else f"{f.grad_norm:.3f}"),
        ("lr", None if f.lr is None else f"{f.lr:.2e}"),
        ("tokens/s", None if f.tokens_per_s is None else f"{f.tokens_per_s:,.0f}"),
        ("step time", None if f.step_time_s is None else seconds(f.step_time_s)),
        ("memory", None if f.memory_bytes is None else f"{f.memory_bytes / 2**30:.2f} GiB"),
        ("MFU", None if f.mfu is None else f"{f.mfu:.1%}"),
        ("ETA", None if f.eta_s is None else duration(f.eta_s)),
    ]
    shown = [(name, text) for name, text in texts if text is not None]
    return shown if f.preferences is None else [*shown[:1], *preference_pairs(f.preferences), *shown[1:]]


def preference_pairs(means: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return means over pairs of answers as (name, text)."""
    texts = [("accuracy", f"{means['accuracy']:.1%}"), ("margin", f"{means['margin']:.4f}")]
    texts += [("rewards", f"{means['chosen']:.3f} / {means['rejected']:.3f}")]
    more = (("log odds", "log_odds"), ("KL", "kl"))
    return [*texts, *((title, f"{means[name]:.4f}") for title, name in more if name in means)]


def seconds(value: float) -> str:
    """Return a time with at least three digits: ``1.50 s``, ``24.3 ms``, ``180 µs``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        scaled = value * factor
        if scaled >= 1 or unit == "µs":
            return f"{scaled:.{max(0, 2 - int(math.log10(max(scaled, 1))))}f} {unit}"
    raise AssertionError


def size(value: float) -> str:
    """Return a number of bytes: ``812 B``, ``1.50 MiB``."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def duration(value: float) -> str:
    """Return a length of time: ``42s``, ``3m05s``, ``2h07m``, ``5d03h``."""
    total_s = max(0, round(value))
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02}s"
    if total_s < 86400:
        return f"{total_s // 3600}h{total_s % 3600 // 60:02}m"
    return f"{total_s // 86400}d{total_s % 86400 // 3600:02}h"

"""The figures of an event that trackers show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partool.plan.event_log import Event
from partool_runtime.trackers.types import FigureRow

_STEP = {
    "loss": "train/loss",
    "kl": "train/kl",
    "multi_token_loss": "train/multi_token_loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "step_time_s": "speed/step_time_s",
    "mfu": "speed/mfu",
    "memory_bytes": "memory/peak_bytes",
}
"""Field of an event ``step`` → name of the figure at trackers."""
_OF_LOG_STEPS = "tokens_per_s"
"""Field that only the events of log steps have."""


def row_of(event: Event) -> FigureRow | None:
    """Return what trackers show of an event: log steps, validations and tasks; None for other events.

    Figures that are not finite, which the event log keeps as null, are left out.
    """
    kind, data = event["kind"], event["data"]
    if kind == "step" and _OF_LOG_STEPS in data:
        figures = _given({title: data.get(name) for name, title in _STEP.items()})
        return FigureRow(data["step"], event["t"], figures | _preferences("preferences", data))
    if kind == "validation":
        figures = _validated("validation", data)
        for name, of_set in (data.get("sets") or {}).items():
            figures |= _validated(f"validation/{name}", of_set)
        texts = tuple((each["prompt"], each["text"]) for each in data.get("samples") or ())
        return FigureRow(data["step"], event["t"], figures, texts)
    if kind == "evaluation":
        return FigureRow(data["step"], event["t"], _given(data.get("tasks") or {}))
    return None


def _validated(prefix: str, data: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a set of data for validation."""
    figures = _given({f"{prefix}/{name}": data.get(name) for name in ("loss", "perplexity", "weights_loss")})
    return figures | _preferences(f"{prefix}/preferences", data)


def _preferences(prefix: str, data: Mapping[str, Any]) -> dict[str, float]:
    return _given({f"{prefix}/{name}": value for name, value in (data.get("preferences") or {}).items()})


def _given(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}

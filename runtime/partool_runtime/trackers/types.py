"""What trackers are given, and what they do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run as its tracker shows it (:func:`partool.plan.tracking.tracked_run`)."""

    tracker: str
    """Name of the tracker in specs."""
    adapter: str
    """``module:Class`` of a :class:`Tracker`."""
    run_id: str
    """The same in every attempt, and different for every run."""
    run_dir: Path
    name: str
    project: str
    group: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    """The plan's outline: names to numbers and texts, nested."""
    uri: str | None
    """LogPlace of the tracker's store; None where the tracker's environment, or its default, says it."""
    keys: tuple[str, ...] = ()
    """Environment variables whose values no message may repeat."""

    @classmethod
    def from_json(cls, text: str) -> TrackedRun:
        """Read what ``tracked_run`` has written as JSON; raises ValueError or TypeError."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("tags", "keys")}
        return cls(**(values | lists | {"run_dir": Path(values["run_dir"])}))

    @property
    def flat_config(self) -> dict[str, Any]:
        """:attr:`config` with the names of nested values joined by dots."""
        return dict(_flat(self.config))


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, inner in value.items():
        pairs += _flat(inner, f"{prefix}{key}.") if isinstance(inner, Mapping) else [(f"{prefix}{key}", inner)]
    return pairs


@dataclass(frozen=True, slots=True)
class FigureRow:
    """The figures of a step."""

    step: int
    at: float
    """Unix time in seconds."""
    figures: Mapping[str, float]
    texts: tuple[tuple[str, str], ...] = ()
    """Prompts, each with what the model adds to it."""
    number: int = 0
    """Rows before this one in the run's event log, over all attempts; a row that is repeated keeps its number."""


class Tracker(Protocol):
    """A run at a tracker. Its construction opens the run, or continues it: attempts share the run's id.

    Any method may raise or block: only this tracker's process ends or waits.
    """

    url: str
    """Where people see the run; empty if the tracker does not say."""

    def __init__(self, run: TrackedRun) -> None:
        """Open the run."""

    def begin(self, step: int) -> None:
        """Note that an attempt begins after ``step`` completed steps; it may repeat later steps of earlier attempts."""

    def log(self, rows: Sequence[FigureRow]) -> None:
        """Send rows, in the order in which they happened; of a repeated step the later row counts."""

    def close(self, exit_code: int) -> None:
        """Send what is still here and end the run, or this attempt of it, with the exit code of rank 0."""

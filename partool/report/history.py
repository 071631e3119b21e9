"""What a run's log tells about its training: curves of figures, the attempts, and what happened when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from partool.plan.event_data import SampleText

Axis = Literal["steps", "tokens", "time"]
"""What a curve runs over: steps, tokens trained on so far, or seconds of the attempts so far."""
Floats = NDArray[np.float64]
MarkKind = Literal["start", "checkpoint", "warning", "error", "nonfinite", "signal", "profile"]
MARK_WORDS: dict[MarkKind, str] = {
    "start": "start of an attempt", "checkpoint": "checkpoint", "profile": "profile", "warning": "warning",
    "error": "error", "nonfinite": "gradient not finite", "signal": "stop",
}  # fmt: skip
"""Words for each kind of mark, in the order in which they are drawn: later kinds lie on top."""
VALIDATION = "validation_"
"""Prefix of the names of curves of validations."""
SET = "/"
"""What separates the name of a named set for validation from its figure, as in ``validation_code/loss``."""


def set_figure(name: str, figure: str = "loss") -> str:
    """Return the name of the curve of a named set's figure."""
    return f"{VALIDATION}{name}{SET}{figure}"


_WARM_UP = 2
"""Steps at the begin of an attempt whose times are not typical."""


@dataclass(frozen=True)
class Series:
    """The finite values of one figure, in the order of the steps."""

    name: str
    steps: Floats
    tokens: Floats
    """Tokens trained on up to the end of each step."""
    time_s: Floats
    """Seconds of all attempts up to then."""
    values: Floats

    def over(self, axis: Axis) -> tuple[Floats, Floats]:
        """Return places on an axis, which rise, and the values there."""
        x = {"steps": self.steps, "tokens": self.tokens, "time": self.time_s}[axis]
        order = np.argsort(x, kind="stable")
        return x[order], self.values[order]

    def summary(self) -> dict[str, object]:
        """Return the first, last, least and greatest value with their steps, and the number of values."""
        places = {"first": 0, "last": -1, "least": int(self.values.argmin()), "greatest": int(self.values.argmax())}
        points = {
            name: {"step": int(self.steps[place]), "value": float(self.values[place])} for name, place in places.items()
        }
        return {"count": len(self.values), **points}


@dataclass(frozen=True)
class Attempt:
    """The time from an attempt's event ``start`` to its last event."""

    number: int
    after_step: int
    """The step that the attempt went on from; 0 for one that began anew."""
    ranks: int
    wall_s: float


@dataclass(frozen=True)
class EventMark:
    """Something that happened during a run."""

    kind: MarkKind
    step: int
    tokens: float
    time_s: float
    text: str

    def at(self, axis: Axis) -> float:
        """Return the mark's place on an axis."""
        return {"steps": float(self.step), "tokens": self.tokens, "time": self.time_s}[axis]


@dataclass(frozen=True)
class History:
    """What the log of a run's first rank tells about its training."""

    curves: Mapping[str, Series]
    """Name → curve, for figures with at least one finite value."""
    attempts: tuple[Attempt, ...]
    marks: tuple[EventMark, ...]
    step: int
    """The step that ended last; an earlier attempt may have come further."""
    tokens: float
    """Tokens trained on up to that step."""
    not_finite: int
    """Number of steps whose loss is not finite."""
    samples: Mapping[int, tuple[SampleText, ...]]
    """Step → the prompts that were continued at its validation, with the texts."""
    end: tuple[int, str] | None
    """Exit code and reason of the last attempt; None while it runs, and if it was killed."""

    @property
    def wall_s(self) -> float:
        """Seconds of all attempts together."""
        return sum(attempt.wall_s for attempt in self.attempts)

    @property
    def device_hours(self) -> float:
        """Ranks times hours, over all attempts."""
        return sum(attempt.ranks * attempt.wall_s for attempt in self.attempts) / 3600

    @property
    def sets(self) -> list[str]:
        """Names of the named sets for validation whose loss was finite once, in order."""
        return sorted(
            name.removeprefix(VALIDATION).removesuffix(f"{SET}loss")
            for name in self.curves
            if name.startswith(VALIDATION) and name.endswith(f"{SET}loss")
        )

    def last(self, name: str) -> tuple[int, float] | None:
        """Return (step, value) of a figure at, or the latest before, the step that ended last; None without one."""
        curve = self.curves.get(name)
        place = -1 if curve is None else int(np.searchsorted(curve.steps, self.step, side="right")) - 1
        return None if curve is None or place < 0 else (int(curve.steps[place]), float(curve.values[place]))

    def least(self, name: str) -> tuple[int, float] | None:
        """Return (step, value) of a figure's least value; None without one."""
        curve = self.curves.get(name)
        if curve is None:
            return None
        place = int(curve.values.argmin())
        return int(curve.steps[place]), float(curve.values[place])

    def median(self, name: str) -> float | None:
        """Return a figure's median over steps, without the first two of each attempt if there are others."""
        curve = self.curves.get(name)
        if curve is None:
            return None
        warm_up = [after + step for after in {a.after_step for a in self.attempts} for step in range(1, _WARM_UP + 1)]
        steady = curve.values[~np.isin(curve.steps, warm_up)]
        return float(np.median(steady if len(steady) else curve.values))


def thin(values: Floats, most: int) -> NDArray[np.intp]:
    """Return the places of at most ``most`` (4 or more) values that show a curve with all its spikes.

    The places are divided into equal buckets, of each of which the least and the greatest value stay; so do the first
    and the last value.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(np.intp)
    kept = {0, count - 1}
    for low, high in pairwise(edges):
        bucket = values[low:high]
        kept |= {int(low + bucket.argmin()), int(low + bucket.argmax())}
    return np.array(sorted(kept), dtype=np.intp)

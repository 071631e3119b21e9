"""From the events of a run's first rank to its history.

A step that a later attempt repeated has the later attempt's figures. The log is read once, event by event.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partool.plan.event_data import SampleText
from partool.plan.event_log import Event, event_log, read_events
from partool.report.history import SET, VALIDATION, Attempt, EventMark, Floats, History, MarkKind, Series

FIGURES = ("loss", "multi_token_loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "step_time_s")
"""Figures of a step that become curves, beside those of pairs of answers."""
PAIRS = ("chosen", "rejected", "margin", "accuracy", "kl", "log_odds")
"""Figures of pairs of answers that become curves, of steps and of validations."""


def read_history(run_dir: Path, *, strict: bool = True) -> History:
    """Return what the log of a run's first rank tells; empty curves without a log.

    Raises :class:`partool.plan.record.DamagedRecordError` for damaged events; unless ``strict``, they are left out.
    """
    return history_of(read_events(event_log(run_dir, 0), strict=strict))


def history_of(events: Iterable[Event]) -> History:
    """Return what events tell, in the order in which a rank wrote them."""
    reader = _Reader()
    for event in events:
        reader.take(event)
    return reader.history()


@dataclass
class _Table:
    """Rows of figures in the order of their steps; a row replaces the earlier row of the same step."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[float]] = field(default_factory=dict)

    def put(self, step: int, row: Mapping[str, float]) -> None:
        """Add a row; a figure that it lacks is NaN, also where an earlier row of the step had one."""
        place = len(self.steps) if not self.steps or step > self.steps[-1] else bisect_left(self.steps, step)
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
            for column in self.columns.values():
                column.insert(place, math.nan)
        for name in row.keys() - self.columns.keys():
            self.columns[name] = array("d", [math.nan]) * len(self.steps)
        for name, column in self.columns.items():
            column[place] = row.get(name, math.nan)

    def array(self, name: str) -> Floats:
        """Return a column; NaN stands for figures that are missing or not finite."""
        return np.array(self.columns.get(name, [math.nan] * len(self.steps)), dtype=np.float64)


class _Reader:
    """Takes events one by one."""

    def __init__(self) -> None:
        self._steps, self._validations = _Table(), _Table()
        self._samples: dict[int, tuple[SampleText, ...]] = {}
        self._not_finite: set[int] = set()
        self._attempts: list[Attempt] = []
        self._marks: dict[tuple[MarkKind, int] | int, tuple[MarkKind, int, float, str]] = {}
        self._step = 0
        self._began: float | None = None
        self._before_s = self._now_s = 0.0
        self._end: tuple[int, str] | None = None

    def take(self, event: Event) -> None:
        """Take the next event."""
        kind, data = event["kind"], event["data"]
        if kind in ("step", "validation", "checkpoint", "end"):
            self._advance(event["t"])
        match kind:
            case "start":
                self._start(event["t"], data)
            case "step":
                self._take_step(data)
            case "validation":
                self._validations.put(data["step"], {"time_s": self._now_s, **_validated(data)})
                samples = tuple(SampleText.model_validate(each) for each in data.get("samples") or ())
                self._samples.pop(data["step"], None)
                if samples:
                    self._samples[data["step"]] = samples
            case "checkpoint" | "nonfinite":
                said = "checkpoint" if kind == "checkpoint" else "gradient not finite"
                self._mark(kind, data["step"], f"{said} at step {data['step']}")
            case "warning":
                self._mark("warning", self._step, str(data.get("message", "")))
            case "error":
                words = ": ".join(filter(None, (data.get("type", ""), data.get("message", ""))))
                self._mark("error", self._step, words)
            case "profile":
                steps = (
                    f"step {data['first']}"
                    if data["first"] == data["last"]
                    else f"steps {data['first']} to {data['last']}"
                )
                self._mark(
                    "profile", data["last"], f"profile of {steps}; partool profile RUN --show says what it shows"
                )
            case "signal":
                self._mark("signal", self._step, f"stop by {data.get('name', 'a signal')}")
            case "end":
                self._end, self._began = (data["exit_code"], data["reason"]), None

    def history(self) -> History:
        """Return what the events so far tell."""
        self._close_attempt()
        tokens = self._tokens()
        curves = self._curves_of(self._steps, (*FIGURES, *PAIRS), "", tokens)
        of_sets = [name for name in self._validations.columns if SET in name]
        curves |= self._curves_of(self._validations, ("loss", *PAIRS, *of_sets), VALIDATION, tokens)
        marks = [
            EventMark(kind, step, float(self._tokens_at(tokens, step)), time_s, text)
            for kind, step, time_s, text in self._marks.values()
        ]
        return History(
            curves={name: curve for name, curve in curves.items() if len(curve.values)},
            attempts=tuple(self._attempts),
            marks=tuple(sorted(marks, key=lambda mark: mark.time_s)),
            step=self._step,
            tokens=float(self._tokens_at(tokens, self._step)),
            not_finite=len(self._not_finite),
            samples=dict(sorted(self._samples.items())),
            end=self._end,
        )

    def _advance(self, t: float) -> None:
        """Move the time on; an attempt that ended, or has not started, takes none."""
        if self._began is None:
            if self._attempts or self._end is not None:
                return
            self._began = t  # the event ``start`` was lost
            self._attempts.append(Attempt(1, 0, 1, 0.0))
        self._now_s = max(self._now_s, self._before_s + t - self._began)

    def _start(self, t: float, data: Mapping[str, Any]) -> None:
        self._close_attempt()
        self._before_s, self._began, self._end = self._now_s, t, None
        number = data.get("attempt") or len(self._attempts) + 1
        after = data.get("resumed_from") or 0
        ranks = data.get("world_size", 1)
        self._attempts.append(Attempt(number, after, ranks, 0.0))
        self._step = after
        words = f"attempt {number} on {ranks} rank{'s' * (ranks > 1)}"
        self._mark("start", after, words + (f", after step {after}" if after else ""))

    def _close_attempt(self) -> None:
        if self._attempts:
            last = self._attempts[-1]
            self._attempts[-1] = Attempt(last.number, last.after_step, last.ranks, self._now_s - self._before_s)

    def _take_step(self, data: Mapping[str, Any]) -> None:
        self._step = data["step"]
        self._steps.put(self._step, {"time_s": self._now_s, **_row(data, (*FIGURES, "tokens"))})
        if "loss" in data and data["loss"] is None:
            self._not_finite.add(self._step)
        else:
            self._not_finite.discard(self._step)

    def _mark(self, kind: MarkKind, step: int, text: str) -> None:
        """Note a mark; of checkpoints and gradients of one step, the later one counts."""
        key = (kind, step) if kind in ("checkpoint", "nonfinite") else len(self._marks)
        self._marks[key] = (kind, step, self._now_s, text)

    def _tokens(self) -> Floats:
        """Return the tokens up to each step; steps that were not logged count like the next one that was."""
        passed = np.diff(np.array(self._steps.steps, dtype=np.float64), prepend=0.0)
        return np.cumsum(passed * np.nan_to_num(self._steps.array("tokens")))

    def _tokens_at(self, tokens: Floats, step: float | Floats) -> Any:
        steps = np.array(self._steps.steps, dtype=np.float64)
        return np.interp(step, [0.0, *steps], [0.0, *tokens])

    def _curves_of(self, table: _Table, names: Iterable[str], prefix: str, tokens: Floats) -> dict[str, Series]:
        steps = np.array(table.steps, dtype=np.float64)
        time_s = table.array("time_s")
        curves = {}
        for name in names:
            values = table.array(name)
            at = np.isfinite(values)
            x = steps[at]
            curves[prefix + name] = Series(prefix + name, x, self._tokens_at(tokens, x), time_s[at], values[at])
        return curves


def _validated(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a validation; those of a named set have its name before a slash."""
    figures = _row(data, ("loss",))
    for name, of_set in (data.get("sets") or {}).items():
        figures |= {f"{name}{SET}{figure}": value for figure, value in _row(of_set, ("loss", "perplexity")).items()}
    return figures


def _row(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Return the figures of an event that are numbers."""
    row = {name: float(data[name]) for name in names if data.get(name) is not None}
    pairs = {"kl": data.get("kl"), **(data.get("preferences") or {})}
    return row | {name: float(pairs[name]) for name in PAIRS if pairs.get(name) is not None}

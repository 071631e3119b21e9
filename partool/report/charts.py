"""Which curves share a picture, and how their values are written: for the terminal, pages and comparisons alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partool.report.history import VALIDATION, Axis, Floats, History, Series, set_figure, thin
from partool.report.html_svg import log_ticks, tick_label, ticks
from partool.spec.numbers import GIB

_UNITS: Mapping[Axis, tuple[tuple[float, str], ...]] = {
    "steps": ((1.0, "step"),),
    "tokens": ((1e12, "T tokens"), (1e9, "B tokens"), (1e6, "M tokens"), (1e3, "k tokens"), (1.0, "tokens")),
    "time": ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")),
}
"""Axis → (size, name) of its units, the largest first."""
_LOG_FROM = 30.0
"""An axis that may be logarithmic is so if the ratio of its largest to its smallest value is at least this number."""
_ROOM = 0.04
"""Share of an axis that stays free above and below the values."""


@dataclass(frozen=True)
class Chart:
    """One picture of some curves."""

    name: str
    title: str
    curves: tuple[tuple[str, str], ...]
    """(Name of a curve, its words)."""
    form: str
    """Format of a value."""
    divisor: float = 1.0
    logarithmic: bool = False
    """Whether the axis of values may be logarithmic."""

    def written(self, value: float) -> str:
        """Return a value as text."""
        return format(value / self.divisor, self.form)


def _both(name: str, words: str) -> tuple[tuple[str, str], ...]:
    return ((name, f"{words}, training"), (f"validation_{name}", f"{words}, validation"))


CHARTS = (
    Chart("loss", "loss", (("loss", "training"), ("validation_loss", "validation")), ".4f", logarithmic=True),
    Chart("grad_norm", "gradient norm", (("grad_norm", "gradient norm"),), ".4g", logarithmic=True),
    Chart("lr", "learning rate", (("lr", "learning rate"),), ".3g"),
    Chart("tokens_per_s", "tokens/s", (("tokens_per_s", "tokens/s"),), ",.0f"),
    Chart("memory_bytes", "peak memory of rank 0, GiB", (("memory_bytes", "memory"),), ".3f", GIB),
    Chart("accuracy", "accuracy of pairs", _both("accuracy", "accuracy"), ".3f"),
    Chart("margin", "margin of pairs", _both("margin", "margin"), ".4f"),
    Chart("rewards", "rewards", (("chosen", "chosen"), ("rejected", "rejected")), ".4f"),
    Chart("kl", "KL per token", _both("kl", "KL"), ".4g"),
    Chart("log_odds", "log odds", _both("log_odds", "log odds"), ".4f"),
)
"""The pictures of a run's report, in their order."""
TRAINING_LOSS = Chart("loss", "training loss", (("loss", "training loss"),), ".4f", logarithmic=True)
VALIDATION_LOSS = Chart(
    "validation_loss", "validation loss", (("validation_loss", "validation loss"),), ".4f", logarithmic=True
)


def set_chart(name: str) -> Chart:
    """Return the chart of the losses of a named set alone."""
    curves = ((set_figure(name), f"validation loss of {name}"),)
    return Chart(f"validation_set_{name}", f"validation loss of {name}", curves, ".4f", logarithmic=True)


@dataclass(frozen=True)
class DrawnLine:
    """A curve as it is drawn: few enough points, in the chart's unit."""

    words: str
    x: Floats
    y: Floats
    dotted: bool = False
    """Whether the points themselves are drawn: there are few, such as those of validations."""
    sign: str = ""
    """Character that stands for the line on the terminal; empty where the picture chooses one."""


def charts_of(history: History) -> list[Chart]:
    """Return the charts that have something to show."""
    curves = tuple((set_figure(name), name) for name in history.sets)
    of_sets = Chart("validation_sets", "validation loss", curves, ".4f", logarithmic=True)
    first, *others = CHARTS
    charts = (first, of_sets, *others)
    return [chart for chart in charts if any(name in history.curves for name, _ in chart.curves)]


@dataclass(frozen=True)
class AxisUnit:
    """What an axis of steps, tokens or time counts in."""

    axis: Axis
    size: float = 1.0
    name: str = "step"


def unit_of(axis: Axis, curves: Iterable[Series]) -> AxisUnit:
    """Return the unit in which the places of curves on an axis are short numbers."""
    high = max((float(curve.over(axis)[0][-1]) for curve in curves), default=0.0)
    size, name = next((each for each in _UNITS[axis] if high >= 2 * each[0]), _UNITS[axis][-1])
    return AxisUnit(axis, size, name)


def line_of(curve: Series, words: str, chart: Chart, unit: AxisUnit, most: int) -> DrawnLine:
    """Return a curve over an axis with at most ``most`` points, spikes kept."""
    x, y = curve.over(unit.axis)
    places = thin(y, most)
    dotted = curve.name.startswith(VALIDATION) or len(places) == 1
    return DrawnLine(words, x[places] / unit.size, y[places] / chart.divisor, dotted)


def chart_lines(chart: Chart, history: History, most: int) -> list[DrawnLine]:
    """Return the lines of a chart of one run, over steps."""
    named = [(history.curves[name], words) for name, words in chart.curves if name in history.curves]
    return [line_of(curve, words, chart, AxisUnit("steps"), most) for curve, words in named]


@dataclass(frozen=True)
class Scale:
    """The range of an axis, and the values with a tick."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False


def value_scale(lines: Sequence[DrawnLine], chart: Chart, most: int) -> Scale:
    """Return the scale of a chart's values, with at most about ``most`` ticks."""
    low, high = _range(line.y for line in lines)
    if chart.logarithmic and low > 0 and high / low >= _LOG_FROM:
        room = (high / low) ** _ROOM
        low, high = low / room, high * room
        marks = log_ticks(low, high)
        return Scale(low, high, tuple(marks[:: -(-len(marks) // most)]), logarithmic=True)
    room = _ROOM * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - room, high + room
    return Scale(low, high, tuple(ticks(low, high, most)))


def place_scale(lines: Sequence[DrawnLine], most: int) -> Scale:
    """Return the scale of steps, tokens or time."""
    low, high = _range(line.x for line in lines)
    if high <= low:
        low, high = low - 1.0, high + 1.0
    return Scale(low, high, tuple(value for value in ticks(low, high, most) if low <= value <= high))


def _range(values: Iterable[Floats]) -> tuple[float, float]:
    every = np.concatenate([each for each in values if len(each)] or [np.zeros(1)])
    return float(every.min()), float(every.max())


def tick_texts(scale: Scale) -> list[str]:
    """Return the texts of ticks, with as many decimals as tell them apart."""
    texts = [tick_label(value) for value in scale.ticks]
    return texts if len(set(texts)) == len(texts) else [f"{value:.6g}" for value in scale.ticks]

"""Curves as SVG that are readable as they are; ``curves.js`` adds zoom and a tip with the values under the pointer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from partool.report.charts import (
    AxisUnit,
    Chart,
    DrawnLine,
    Scale,
    chart_lines,
    charts_of,
    place_scale,
    tick_texts,
    value_scale,
)
from partool.report.history import MARK_WORDS, EventMark, History, MarkKind
from partool.report.html_svg import Picture, number, tag, text

_WIDTH, _HEIGHT = 480.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 22.0, 14.0, 36.0
_POINTS = 2000
"""Most points of a curve of a run's page; those that a zoom shows, too."""
_MARKS = 100
"""Most marks of a kind in a picture."""
COLOURS = 10
"""Colours of lines; further lines have the same colours and are dashed."""


@dataclass(frozen=True)
class CurvesView:
    """The curves of a run on its page."""

    pictures: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]
    """(Title, SVG, legend as (class, words)) of each chart; charts of one curve have no legend."""
    marks: tuple[tuple[MarkKind, str], ...]
    """Kind and words of the marks that are drawn."""


def curves_view(history: History) -> CurvesView:
    """Return the pictures of a run's curves over its steps."""
    pictures = []
    for chart in charts_of(history):
        lines = chart_lines(chart, history, _POINTS)
        svg = curves_picture(f"curves-{chart.name}", chart, lines, AxisUnit("steps"), marks=history.marks)
        legend = tuple((line_class(place), line.words) for place, line in enumerate(lines)) if len(lines) > 1 else ()
        pictures.append((chart.title, svg, legend))
    kinds = {mark.kind for mark in history.marks}
    return CurvesView(tuple(pictures), tuple((kind, words) for kind, words in MARK_WORDS.items() if kind in kinds))


def line_class(place: int) -> str:
    """Return the classes of the line at a place among others."""
    return f"s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")


def curves_picture(
    identifier: str,
    chart: Chart,
    lines: Sequence[DrawnLine],
    unit: AxisUnit,
    *,
    marks: Iterable[EventMark] = (),
    places: Sequence[int] | None = None,
) -> str:
    """Return the SVG of some lines over an axis; ``identifier`` must be unique in the page.

    ``places`` choose the lines' colours, where these are not their order.
    """
    x, y = place_scale(lines, 6), value_scale(lines, chart, 6)
    to_x = _linear(x.low, x.high, _LEFT, _WIDTH - _RIGHT)
    to_y = _pixels(y)
    picture = Picture(
        _WIDTH, _HEIGHT, f"{chart.title} over {unit.axis}", _described(chart, lines, unit),
        class_="curves", data_low=_exact(x.low), data_high=_exact(x.high), data_bottom=_exact(y.low),
        data_top=_exact(y.high), data_log=int(y.logarithmic), data_unit=unit.name,
        data_plot=f"{number(_LEFT)} {number(_WIDTH - _RIGHT)} {number(_TOP)} {number(_HEIGHT - _BOTTOM)}",
    )  # fmt: skip
    _grid(picture, (x, y), (to_x, to_y), unit)
    clip = f"{identifier}-clip"
    picture.add("clipPath", _frame(), id=clip)
    drawn = [_mark(mark, to_x(mark.at(unit.axis) / unit.size), unit) for mark in _drawn_marks(marks, x, unit)]
    drawn += [_line(line, place, to_x, to_y) for place, line in zip(places or range(len(lines)), lines, strict=True)]
    picture.add("g", *drawn, clip_path=f"url(#{clip})")
    picture.add("line", class_="cursor", x1=0.0, x2=0.0, y1=_TOP, y2=_HEIGHT - _BOTTOM, visibility="hidden")
    picture.add("rect", class_="brush", x=0.0, y=_TOP, width=0.0, height=_HEIGHT - _BOTTOM - _TOP)
    picture.add("rect", class_="hit", x=_LEFT, y=_TOP, width=_WIDTH - _LEFT - _RIGHT, height=_HEIGHT - _TOP - _BOTTOM)
    return picture.markup(identifier)


def _described(chart: Chart, lines: Sequence[DrawnLine], unit: AxisUnit) -> str:
    parts = []
    for line in lines[:20]:
        if len(line.y):
            first, last, least = (format(float(value), chart.form) for value in (line.y[0], line.y[-1], line.y.min()))
            parts.append(f"{line.words}: first {first}, last {last}, least {least}")
    return f"over {unit.name}; " + "; ".join(parts or ["no values"])


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _pixels(scale: Scale) -> Callable[[float], float]:
    """Return a function from a value to its height in the picture."""
    bottom, top = _HEIGHT - _BOTTOM, _TOP
    if not scale.logarithmic:
        return _linear(scale.low, scale.high, bottom, top)
    to_y = _linear(math.log(scale.low), math.log(scale.high), bottom, top)
    return lambda value: to_y(math.log(max(value, scale.low)))


def _frame() -> str:
    return tag("rect", x=_LEFT, y=_TOP, width=_WIDTH - _LEFT - _RIGHT, height=_HEIGHT - _BOTTOM - _TOP)


def _grid(
    picture: Picture,
    scales: tuple[Scale, Scale],
    pixels: tuple[Callable[[float], float], Callable[[float], float]],
    unit: AxisUnit,
) -> None:
    (x, y), (to_x, to_y) = scales, pixels
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    columns, rows = [], []
    for value, words in zip(x.ticks, tick_texts(x), strict=True):
        at = to_x(value)
        columns.append(tag("line", class_="grid", x1=at, x2=at, y1=_TOP, y2=bottom))
        columns.append(tag("text", text(words), class_="label", x=at, y=bottom + 15, text_anchor="middle"))
    for value, words in zip(y.ticks, tick_texts(y), strict=True):
        at = to_y(value)
        rows.append(tag("line", class_="grid", x1=_LEFT, x2=right, y1=at, y2=at))
        rows.append(tag("text", text(words), class_="label", x=_LEFT - 6, y=at + 4, text_anchor="end"))
    picture.add("g", *columns, class_="columns")
    picture.add("g", *rows, class_="rows")
    picture.add("rect", class_="frame", x=_LEFT, y=_TOP, width=right - _LEFT, height=bottom - _TOP)
    picture.add("text", text(unit.name), class_="label", x=right, y=_HEIGHT - 5, text_anchor="end")


def _line(line: DrawnLine, place: int, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    points = [(to_x(float(x)), to_y(float(y))) for x, y in zip(line.x, line.y, strict=True)]
    trace = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    paths = [tag("path", class_="trace", d=f"M{trace}")] if points else []
    if line.dotted:
        paths.append(tag("path", class_="dots", d="".join(f"M{number(x)} {number(y)}h0" for x, y in points)))
    return tag(
        "g", *paths, class_=f"curve {line_class(place)}", data_words=line.words,
        data_x=" ".join(map(_exact, line.x.tolist())), data_y=" ".join(map(_exact, line.y.tolist())),
    )  # fmt: skip


def _exact(value: float) -> str:
    return f"{value:.6g}"


def _drawn_marks(marks: Iterable[EventMark], scale: Scale, unit: AxisUnit) -> list[EventMark]:
    """Return the marks inside of a picture, of each kind as many as can be told apart."""
    inside = [mark for mark in marks if scale.low <= mark.at(unit.axis) / unit.size <= scale.high]
    drawn = []
    for kind in MARK_WORDS:
        some = [mark for mark in inside if mark.kind == kind]
        drawn += some[:: -(-len(some) // _MARKS) or 1]
    return drawn


def _mark(mark: EventMark, x: float, unit: AxisUnit) -> str:
    """Return a mark: a vertical line, or for checkpoints a triangle on the axis."""
    bottom = _HEIGHT - _BOTTOM
    if mark.kind == "checkpoint":
        shape = tag("path", d=f"M-4 {number(bottom)}h8l-4 -7z")
    else:
        shape = tag("line", x1=0.0, x2=0.0, y1=_TOP, y2=bottom)
    where = "" if mark.text.endswith(f"step {mark.step}") else f"step {mark.step:,}: "
    return tag(
        "g", tag("title", text(f"{where}{mark.text}")), shape, class_=f"mark {mark.kind}",
        transform=f"translate({number(x)} 0)", data_at=_exact(mark.at(unit.axis) / unit.size),
    )  # fmt: skip

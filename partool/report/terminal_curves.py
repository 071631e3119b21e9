"""Curves on the terminal, drawn by plotext (https://github.com/piccolomo/plotext), which is an extra."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

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

NO_PLOTEXT = "Curves on the terminal need plotext (pip install 'partool[curves]'); --html FILE draws them without it."
_WIDEST, _NARROWEST = 120, 40
"""Columns of a picture; two stand side by side where each has at least the lesser number less two."""
_TALL, _SHORT = 15, 10
"""Lines of the first picture, and of the others."""
_POINTS_PER_COLUMN = 4
_COLOURS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+", "gray", "blue", "green", "magenta")
_SIGNS: dict[MarkKind, str] = {
    "checkpoint": "^", "profile": "p", "signal": "s", "start": "|", "nonfinite": "n", "warning": "!", "error": "x",
}  # fmt: skip
"""Sign of each kind of mark; where several fall on one column, the last of these kinds is shown."""
_FINE = "braille"
"""Name of plotext's marker with eight points in a character."""
_SIGN_OF_FINE = "⠒"


def render_history(history: History, console: Console) -> None:
    """Print all curves of a run over its steps, with what happened below the first of them."""
    charts = charts_of(history)
    if not charts or not can_draw(console):
        return
    width = widest(console)
    first, *others = charts
    most = _POINTS_PER_COLUMN * width
    lines = picture(first, chart_lines(first, history, most), AxisUnit("steps"), (width, _TALL))
    scale = place_scale(chart_lines(first, history, most), 5)
    _show(lines, console)
    _strip(lines, scale, [mark for mark in history.marks if mark.kind in _SIGNS], console)
    half = (width - 2) // 2
    columns = 2 if half >= _NARROWEST - 2 else 1
    for place in range(0, len(others), columns):
        size = (half if columns == 2 else width, _SHORT)
        row = others[place : place + columns]
        drawn = [picture(chart, chart_lines(chart, history, most), AxisUnit("steps"), size) for chart in row]
        _show([_beside(parts) for parts in zip(*drawn, strict=True)], console)
    console.print()


def widest(console: Console) -> int:
    """Return the columns of a picture that stands alone."""
    return min(console.width, _WIDEST)


def can_draw(console: Console) -> bool:
    """Return True if curves can be printed; prints the reason if they cannot."""
    if console.options.ascii_only:
        console.print(Text("The output's encoding has no characters for curves; --html FILE draws them."))
        return False
    try:
        import plotext  # noqa: F401
    except ImportError:
        console.print(Text(NO_PLOTEXT))
        return False
    return True


def picture(chart: Chart, lines: Sequence[DrawnLine], unit: AxisUnit, size: tuple[int, int]) -> list[Text]:
    """Return the lines of a picture of ``size`` (columns, lines); each has exactly this number of columns."""
    import plotext

    width, height = size
    y, x = value_scale(lines, chart, max(3, height // 3)), place_scale(lines, max(3, width // 12))
    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.plotsize(width, height)
    for part in ("canvas_color", "axes_color", "ticks_color"):
        getattr(plotext, part)("default")
    title = _title(chart, lines, unit)  # plotext leaves a title out that is wider than its picture
    plotext.title(title if len(title) <= width else f"{title[: width - 1]}…")
    for number, line in enumerate(lines):
        xs, ys = line.x.tolist(), [_at(y, value) for value in line.y.tolist()]
        draw = plotext.scatter if line.dotted else plotext.plot
        draw(xs, ys, marker=_marker(line, number), color=_COLOURS[number % len(_COLOURS)])
    plotext.xlim(x.low, x.high)
    plotext.ylim(_at(y, y.low), _at(y, y.high))
    plotext.xticks(list(x.ticks), tick_texts(x))
    plotext.yticks([_at(y, value) for value in y.ticks], tick_texts(y))
    rows = [Text.from_ansi(row) for row in plotext.build().splitlines()]
    return [_fitted(row, width) for row in rows if row.plain.strip()]


def _title(chart: Chart, lines: Sequence[DrawnLine], unit: AxisUnit) -> str:
    """Return a title that names what the lines are, unless they are runs, which have signs of their own."""
    over = f"time ({unit.name})" if unit.axis == "time" else unit.name
    title = chart.title if unit.axis == "steps" else f"{chart.title} over {over}"
    if len(lines) < 2 or lines[0].sign:
        return title
    signs = [_SIGN_OF_FINE if (sign := _marker(line, number)) == _FINE else sign for number, line in enumerate(lines)]
    return f"{title}: {', '.join(f'{sign} {line.words}' for sign, line in zip(signs, lines, strict=True))}"


def _marker(line: DrawnLine, number: int) -> str:
    if line.sign:
        return line.sign
    return "o" if line.dotted else "x" if number else _FINE


def _at(scale: Scale, value: float) -> float:
    return math.log10(max(value, scale.low)) if scale.logarithmic else value


def _fitted(row: Text, width: int) -> Text:
    row.truncate(width, pad=True)
    return row


def _beside(parts: Sequence[Text]) -> Text:
    return Text("  ").join(parts)


def _show(rows: Sequence[Text], console: Console) -> None:
    for row in rows:
        console.print(row, no_wrap=True, crop=True)


def _strip(rows: Sequence[Text], scale: Scale, marks: Sequence[EventMark], console: Console) -> None:
    """Print signs of marks below the columns of their steps, and what the signs mean."""
    frame = next((row.plain for row in rows if "┌" in row.plain), "")
    if not frame or not marks:
        return
    start, stop = frame.index("┌") + 1, frame.rindex("┐") - 1
    columns = [" "] * len(frame)
    for kind, sign in _SIGNS.items():
        for mark in marks:
            if mark.kind == kind and scale.low <= mark.step <= scale.high:
                share = (mark.step - scale.low) / (scale.high - scale.low)
                columns[start + round(share * (stop - start))] = sign
    console.print(Text("".join(columns).rstrip()), no_wrap=True, crop=True)
    kinds = [kind for kind in _SIGNS if any(mark.kind == kind for mark in marks)]
    console.print(Text(" " * start + "  ".join(f"{_SIGNS[kind]} {MARK_WORDS[kind]}" for kind in kinds), style="dim"))

"""Timelines on a terminal: a line per rank, and a coloured box per action (letters on terminals without colours)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from partool.plan.types import Plan
from partool.report.drawing import Drawing, Window, inside, shown_rows
from partool.report.html_svg import tick_label, ticks
from partool.report.timeline import bubble_words, planned, shares_cores, without_pipeline
from partool.report.units import counted, seconds
from partool.schedule import TimedAction

_ROWS = 16
"""Maximum number of lines; if there are more ranks, the first and the last are drawn."""
_COLOURS = {
    "F": ("#6fbdea", "#b3dcf4"),
    "B": ("#2fb38a", "#8fd8c0"),
    "I": ("#f0c419", "#f8e189"),
    "W": ("#e08a5b", "#f0bda2"),
}
"""Kind of action → two colours for alternating stages of a rank; HTML pages use equal colours."""
_INK = "#111111"
_ACTIONS = 20_000
"""Maximum number of actions that are simulated for the picture."""
_PARTS = 3
"""Maximum number of parts of a step that are all drawn; if there are more, only the first and last part are drawn."""
_USUAL = 0.4
"""Maximum share of boxes that may be too narrow for their numbers, as the shortest actions often are."""
_TIGHTER = 0.3
"""Share by which the time span of a part may exceed the span whose boxes fit well."""
_LEAST = 40
"""Minimum number of columns for the boxes of a line, however narrow the terminal is."""


def render_timeline(
    drawing: Drawing, console: Console, *, unit: str = "s", parts: Sequence[Window] | None = None
) -> None:
    """Print a timeline; ``unit`` is printed after times, and may be empty.

    ``parts`` are the windows to draw, taken from the timeline that ``drawing`` is compared with.
    """
    colour = _has_colour(console)
    rows = shown_rows(drawing.ranks, _ROWS)
    name, sides = _name_width(drawing), _sides(drawing)
    width = _width(drawing, console)
    parts = console_windows(drawing, console) if parts is None else [part.of(drawing) for part in parts]
    for part in parts:
        if part.title:
            console.print(Text(" " * (name + 1) + part.title, "dim"))
        boxes: dict[int, list[TimedAction]] = {rank: [] for rank in range(drawing.ranks)}
        for box in inside(drawing, part):
            boxes[box.rank].append(box)
        for index, rank in enumerate(rows):
            if index and rank != rows[index - 1] + 1:
                console.print(Text(f"{'…':>{name}}", "dim"))
            line = Text().append(f"rank {rank}".rjust(name) + " ", "dim")
            line.append_text(_line(boxes[rank], part, width, _Look(colour, drawing.stages_per_pass > 1, drawing.pale)))
            line.append(" " + sides[rank], "dim")
            console.print(line, no_wrap=True, overflow="crop", crop=True)
        console.print(Text(" " * (name + 1) + _axis(part, width, unit), "dim"), no_wrap=True, overflow="crop")
    console.print(_legend(drawing, colour=colour))


def render_plan_timeline(plan: Plan, console: Console) -> None:
    """Print the schedule of a plan in time, or the reason why there is none."""
    if note := without_pipeline(plan):
        console.print(Text(note))
        return
    try:
        drawing = planned(plan, _ACTIONS)
    except ValueError as error:
        console.print(Text(f"The schedule cannot be drawn: {error}."))
        return
    console.print(Text(summary(drawing), "bold"))
    render_timeline(drawing, console)
    if shares_cores(plan):
        console.print(Text(bubble_words(plan, drawing)))


def _has_colour(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def _sides(drawing: Drawing) -> list[str]:
    """Return for each rank the text to the right of its line: idle share, and peak of micro-batches held."""
    sides = []
    for busy_s, in_flight in zip(drawing.busy_s, drawing.in_flight, strict=True):
        idle = max(0.0, 1.0 - busy_s / drawing.span_s) if drawing.span_s else 0.0
        sides.append(f"{idle:>4.0%} idle" + (f", holds {in_flight / drawing.stages_per_pass:.3g}" if in_flight else ""))
    return sides


def console_windows(drawing: Drawing, console: Console, span_s: float = 0.0) -> list[Window]:
    """Return the windows to draw: the whole step in parts with wide enough boxes, or only the step's two ends.

    If ``span_s`` is later than the step's end, the windows on the whole step extend to ``span_s``.
    """
    width = _width(drawing, console)
    columns = len(str(drawing.micro_batches - 1)) + 1 + (not _has_colour(console))
    lengths = sorted(box.stop_s - box.start_s for box in drawing.boxes)
    fit_s = width / columns * lengths[int(_USUAL * len(lengths))] if lengths else 0.0
    whole_s, left_out = max(drawing.span_s, span_s), drawing.left_out
    count = math.ceil(whole_s / fit_s - _TIGHTER) if fit_s else 1
    if count <= _PARTS and left_out is None:
        ends = [whole_s * index / max(count, 1) for index in range(max(count, 1) + 1)]
        return [Window("", low, high) for low, high in pairwise(ends)]
    if left_out is not None:
        fit_s = min(fit_s, left_out.from_s, whole_s - left_out.to_s)
    last = Window("the last part", drawing.span_s - fit_s, drawing.span_s, at_end=True)
    return [Window("the first part", 0.0, fit_s), last]


def _name_width(drawing: Drawing) -> int:
    return len(f"rank {drawing.ranks - 1}")


def _width(drawing: Drawing, console: Console) -> int:
    """Return the number of the console's columns that are left for the boxes of a line."""
    return max(console.width - _name_width(drawing) - 2 - max(map(len, _sides(drawing))), _LEAST)


class _Look(NamedTuple):
    """Options for drawing boxes."""

    colour: bool
    """True: colours show the kinds of actions; False: letters do."""
    several: bool
    """True if ranks have several stages, so that a box shows its stage where it fits."""
    pale: frozenset[int]
    """Stages drawn in a lighter tone."""


def _line(boxes: Sequence[TimedAction], window: Window, width: int, look: _Look) -> Text:
    """Return a rank's boxes in a window as one line of text."""
    scale = width / (window.to_s - window.from_s)
    blank = " " if look.colour else "·"
    line, at = Text(), 0
    for box in boxes:
        left = max(at, round((box.start_s - window.from_s) * scale))
        right = min(width, round((box.stop_s - window.from_s) * scale))
        if right > left:
            line.append(blank * (left - at))
            line.append_text((_box if look.colour else _letters)(box, right - left, look))
            at = right
    return line.append(blank * (width - at))


def _box(box: TimedAction, columns: int, look: _Look) -> Text:
    """Return a coloured box with a thin line at its left edge; a box of one column shows a one-digit number instead."""
    kind, stage, batch = box.action
    style = f"{_INK} on {_COLOURS[kind][stage in look.pale]}"
    named, label = f"{stage}{kind}{batch}", str(batch)
    if look.several and columns > len(named):
        return Text("▏" + named.center(columns - 1), style)
    if columns > len(label):
        return Text("▏" + label.center(columns - 1), style)
    return Text(label if columns == len(label) == 1 else "▏" + " " * (columns - 1), style)


def _letters(box: TimedAction, columns: int, look: _Look) -> Text:
    """Return a box without colours: ``3F0`` or ``F0``, filled up to ``columns`` characters, with an edge if it fits."""
    kind, stage, batch = box.action
    named, label = f"{stage}{kind}{batch}", f"{kind}{batch}"
    if look.several and columns > len(named):
        label = named
    if columns == len(label):
        return Text(label)
    if columns < len(label):
        return Text(kind * (columns - 1) + "|" if columns > 1 else kind)
    return Text(label.ljust(columns - 1, {"F": " ", "B": "-", "I": "~", "W": "="}[kind]) + "|")


def _axis(window: Window, width: int, unit: str) -> str:
    """Return the time axis as text; round times stand below their columns."""
    scale = width / (window.to_s - window.from_s)
    line = [" "] * (width + 12)
    free = 0
    for value in ticks(window.from_s, window.to_s, max(2, width // 12)):
        at = round((value - window.from_s) * scale)
        label = "▏" + _time(value, unit)
        if at >= free and at + len(label) <= len(line):
            line[at : at + len(label)] = label
            free = at + len(label) + 1
    return "".join(line).rstrip()


def _time(value: float, unit: str) -> str:
    return seconds(value).replace(" ", "") if unit and value else tick_label(value)


def _legend(drawing: Drawing, *, colour: bool) -> Text:
    line = Text()
    for kind, words in drawing.kinds:
        if colour:
            line.append("  ", f"on {_COLOURS[kind][0]}")
        else:
            line.append(kind)
        line.append(f" {words}   ")
    if colour and drawing.pale:
        line.append("pale: every second stage   ", "dim")
    line.append("numbers: micro-batches", "dim")
    if drawing.stages_per_pass > 1:
        stage, batch = drawing.boxes[-1].action[1:] if drawing.boxes else (0, 0)
        line.append(f"; {stage}F{batch}: of stage {stage}", "dim")
    return line


def summary(drawing: Drawing, unit: str = "s") -> str:
    """Return a timeline as one line of text."""
    span = seconds(drawing.span_s) if unit else f"{drawing.span_s:.4g} forward passes of a rank"
    return (
        f"{drawing.name}, {counted(drawing.ranks, 'rank')}, {counted(drawing.micro_batches, 'micro-batch')}: {span}, "
        f"ranks idle {drawing.bubble:.1%} of it"
    )

"""Timelines as SVG: a row per rank, a box per action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partool.plan.types import Plan
from partool.report.drawing import KINDS, Drawing, Window, inside, shown_rows, windows
from partool.report.html_svg import Picture, tag, text, tick_label, ticks
from partool.report.timeline import bubble_words, planned, without_pipeline
from partool.report.units import counted, seconds
from partool.schedule import TimedAction

_ACTIONS = 20_000
"""Maximum number of actions that are simulated for the picture."""
_BOXES = 700
"""Maximum number of boxes in one part of the picture; more would make the page slow."""
_PER_ROW = 48
"""Maximum number of boxes in one row of a part, if micro-batch numbers have one or two digits."""
_ROWS = 24
"""Maximum number of rows; if there are more ranks, the first and the last are drawn."""
_WIDTH, _LEFT, _ROW = 1160.0, 64.0, 26.0


@dataclass(frozen=True)
class TimelinePart:
    """One picture: the whole step, its beginning or its end."""

    title: str
    svg: str


@dataclass(frozen=True)
class TimelineView:
    """Content of a timeline on a page."""

    name: str = ""
    """Name of the schedule."""
    parts: tuple[TimelinePart, ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    """(Letter, name) of each kind of compute action that occurs."""
    pale: bool = False
    """True if some stages are drawn in a lighter tone."""
    bubble: float = 0.0
    span_s: float = 0.0
    words: str = ""
    """Text on how the timeline relates to the terms of the plan."""
    note: str = ""


def timeline_view(plan: Plan) -> TimelineView:
    """Return the pictures of a plan's schedule, or a note that says why there are none."""
    if note := without_pipeline(plan):
        return TimelineView(note=note)
    try:
        drawing = planned(plan, _ACTIONS)
        return replace(drawing_view(drawing, "timeline"), words=bubble_words(plan, drawing))
    except ValueError as error:
        return TimelineView(note=f"The schedule cannot be drawn: {error}.")


def drawing_view(drawing: Drawing, identifier: str, parts: Sequence[Window] | None = None) -> TimelineView:
    """Return the pictures of a timeline; their ids begin with ``identifier``, which must be unique in a page.

    ``parts`` are the windows to draw, taken from the timeline that ``drawing`` is compared with.
    """
    rows = shown_rows(drawing.ranks, _ROWS)
    shown = page_windows(drawing) if parts is None else [part.of(drawing) for part in parts]
    names = ["all"] if len(shown) == 1 else ["first", "last"]
    return TimelineView(
        name=drawing.name,
        parts=tuple(
            TimelinePart(part.title, _picture(drawing, part, rows, f"{identifier}-{name}"))
            for part, name in zip(shown, names, strict=True)
        ),
        kinds=drawing.kinds,
        pale=bool(drawing.pale),
        bubble=drawing.bubble,
        span_s=drawing.span_s,
    )


_LEAST_S = 1e-12
"""Least span of a window in seconds; a log may say that a step took no time."""


def page_windows(drawing: Drawing) -> list[Window]:
    """Return the parts of a timeline that are drawn: the whole timeline or, if it is long, both ends."""
    rows = shown_rows(drawing.ranks, _ROWS)
    return windows(drawing, rows, min(_PER_ROW, _BOXES // len(rows)))


def _picture(drawing: Drawing, window: Window, rows: Sequence[int], identifier: str) -> str:
    low, high = window.from_s, window.to_s
    scale = (_WIDTH - _LEFT - 8) / max(high - low, _LEAST_S)
    bottom = _ROW * len(rows)
    gap = next((index for index in range(1, len(rows)) if rows[index] != rows[index - 1] + 1), None)
    place = {rank: index for index, rank in enumerate(rows)}
    boxes = [box for box in inside(drawing, window) if box.rank in place]
    words = f"{drawing.name} schedule of {counted(drawing.ranks, 'pipeline rank')}, {len(boxes)} actions drawn"
    picture = Picture(_WIDTH, bottom + 46, window.title, words, class_="timeline")
    for index, rank in enumerate(rows):
        y = _ROW * index
        picture.add("rect", class_="idle", x=_LEFT, y=y + 2, width=_WIDTH - _LEFT - 8, height=_ROW - 4)
        picture.add("text", f"rank {rank}", class_="label", x=_LEFT - 8, y=y + 17, text_anchor="end")
    if gap is not None:
        picture.add("line", class_="gap", x1=0, x2=_WIDTH, y1=_ROW * gap, y2=_ROW * gap)
    for box in boxes:
        _box(picture, box, _ROW * place[box.rank], (low, high, scale), pale=box.action.stage in drawing.pale)
    for value in ticks(low, high, 9):
        x = _LEFT + (value - low) * scale
        picture.add("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 5)
        picture.add("text", tick_label(value), class_="label", x=x, y=bottom + 18, text_anchor="middle")
    picture.add("text", "seconds since the step began", class_="label", x=_LEFT, y=bottom + 38)
    return picture.markup(identifier)


def _box(picture: Picture, box: TimedAction, y: float, window: tuple[float, float, float], *, pale: bool) -> None:
    """Draw one action, cut off at the window's edges, with its number if there is room."""
    low, high, scale = window
    start, stop = max(box.start_s, low), min(box.stop_s, high)
    kind, stage, batch = box.action
    x, width = _LEFT + (start - low) * scale, (stop - start) * scale
    if width <= 0.0:
        return
    label = str(batch)
    took = seconds(box.stop_s - box.start_s)
    words = f"rank {box.rank}: {KINDS[kind]} of stage {stage}, micro-batch {label}, {took}"
    odd = " odd" if pale else ""
    parts = [
        tag("title", text(words)),
        tag("rect", class_=f"a{kind}{odd}", x=x, y=y + 2, width=max(width - 0.6, 0.4), height=_ROW - 4),
    ]
    if width >= 6.2 * len(label) + 2:
        parts.append(tag("text", label, x=x + width / 2 - 0.3, y=y + 17))
    picture.add("g", *parts, class_="event")

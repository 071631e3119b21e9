"""The pipeline's timeline as SVG: a row per rank, a box per action."""

from __future__ import annotations

from dataclasses import dataclass

from partool.plan.types import Plan
from partool.report.html_svg import Picture, tag, text, tick_label, ticks
from partool.report.timeline import KINDS, Simulated, shift, simulated
from partool.report.units import seconds
from partool.schedule import Event

_ACTIONS = 20_000
"""Actions followed for the picture."""
_BOXES = 700
"""Boxes in one part of the picture; more would make the page heavy."""
_PER_ROW = 48
"""Boxes in one row of a part, where micro-batches have numbers of one digit or two."""
_ROWS = 24
"""Rows drawn; of more ranks, the first and the last."""
_WIDTH, _LEFT, _ROW = 1160.0, 64.0, 26.0


@dataclass(frozen=True)
class TimelinePart:
    """One picture: the whole step, its beginning or its end."""

    title: str
    svg: str


@dataclass(frozen=True)
class TimelineView:
    """What the page shows of the schedule."""

    parts: tuple[TimelinePart, ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    """Letter and meaning of the kinds of actions that occur."""
    bubble: float = 0.0
    span_s: float = 0.0
    note: str = ""


def timeline_view(plan: Plan) -> TimelineView:
    """Return the pictures of the schedule, or a note that says why there are none."""
    if plan.layout.mesh.pp == 1:
        k = plan.layout.accumulation
        batches = f"{k} micro-batches, one after the other" if k > 1 else "one micro-batch"
        return TimelineView(note=f"No pipeline: every rank runs all layers on {batches}, forward then backward.")
    try:
        found = simulated(plan, _ACTIONS)
    except ValueError as error:
        return TimelineView(note=f"The schedule cannot be drawn: {error}.")
    ranks = found.schedule.ranks
    rows = list(range(ranks)) if ranks <= _ROWS else [*range(_ROWS // 2), *range(ranks - _ROWS // 2, ranks)]
    seen = {event.action.kind for event in found.events}
    return TimelineView(
        parts=tuple(_parts(plan, found, rows)),
        kinds=tuple((kind, words) for kind, words in KINDS.items() if kind in seen),
        bubble=found.bubble,
        span_s=found.span_s,
    )


def _parts(plan: Plan, found: Simulated, rows: list[int]) -> list[TimelinePart]:
    kept = set(rows)
    events = [event for event in found.events if event.rank in kept]
    m = plan.layout.accumulation
    limit = min(_BOXES, _PER_ROW * len(rows))
    fewer = limit * 2 // max(len(str(m - 1)), 2)  # Longer numbers need wider boxes.
    if len(events) <= 1.25 * limit and not found.skipped:
        title = f"The whole step: {m} micro-batches"
        return [TimelinePart(title, _picture(found, events, rows, (0.0, found.span_s), ("timeline-all", title)))]
    until_s = events[limit].start_s
    from_s = sorted(event.stop_s for event in events)[-fewer - 1]
    shown_s = found.span_s - found.skipped_s
    late = found.skipped_s
    first = [event for event in events if event.start_s < until_s]
    last = [event for event in events if event.stop_s > from_s]
    titles = (f"The first {seconds(until_s)}", f"The last {seconds(shown_s - from_s)}")
    return [
        TimelinePart(titles[0], _picture(found, first, rows, (0.0, until_s), ("timeline-first", titles[0]))),
        TimelinePart(
            titles[1], _picture(found, last, rows, (from_s + late, found.span_s), ("timeline-last", titles[1]))
        ),
    ]


def _picture(
    found: Simulated, events: list[Event], rows: list[int], window: tuple[float, float], named: tuple[str, str]
) -> str:
    low, high = window
    identifier, title = named
    scale = (_WIDTH - _LEFT - 8) / (high - low)
    bottom = _ROW * len(rows)
    gap = next((index for index in range(1, len(rows)) if rows[index] != rows[index - 1] + 1), None)
    words = f"{found.schedule.name} schedule of {found.schedule.ranks} pipeline ranks, {len(events)} actions drawn"
    picture = Picture(_WIDTH, bottom + 46, title, words, class_="timeline")
    for index, rank in enumerate(rows):
        y = _ROW * index
        picture.add("rect", class_="idle", x=_LEFT, y=y + 2, width=_WIDTH - _LEFT - 8, height=_ROW - 4)
        picture.add("text", f"rank {rank}", class_="label", x=_LEFT - 8, y=y + 17, text_anchor="end")
    if gap is not None:
        picture.add("line", class_="gap", x1=0, x2=_WIDTH, y1=_ROW * gap, y2=_ROW * gap)
    for event in events:
        _box(picture, found, event, _ROW * rows.index(event.rank), (low, high, scale))
    for value in ticks(low, high, 9):
        x = _LEFT + (value - low) * scale
        picture.add("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 5)
        picture.add("text", tick_label(value), class_="label", x=x, y=bottom + 18, text_anchor="middle")
    picture.add("text", "seconds since the step began", class_="label", x=_LEFT, y=bottom + 38)
    return picture.markup(identifier)


def _box(picture: Picture, found: Simulated, event: Event, y: float, window: tuple[float, float, float]) -> None:
    """Draw one action, cut off at the window's edges; its number stands in it where there is room."""
    low, high, scale = window
    late_s, later = shift(found, event)
    start, stop = max(event.start_s + late_s, low), min(event.stop_s + late_s, high)
    kind, stage, batch = event.action
    x, width = _LEFT + (start - low) * scale, (stop - start) * scale
    if width <= 0.0:
        return
    label = str(batch + later)
    took = seconds(event.stop_s - event.start_s)
    words = f"rank {event.rank}: {KINDS[kind]} of stage {stage}, micro-batch {label}, {took}"
    odd = " odd" if (stage // found.schedule.ranks) % 2 else ""
    parts = [
        tag("title", text(words)),
        tag("rect", class_=f"a{kind}{odd}", x=x, y=y + 2, width=max(width - 0.6, 0.4), height=_ROW - 4),
    ]
    if width >= 6.2 * len(label) + 2:
        parts.append(tag("text", label, x=x + width / 2 - 0.3, y=y + 17))
    picture.add("g", *parts, class_="event")

"""The timeline of a schedule: each rank's actions (boxes) in seconds since the step began. All pictures show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partool.report.units import counted, seconds
from partool.schedule import Schedule, TimedAction, Timeline
from partool.schedule.simulate import idle_share, peak_held

KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Letter of a compute action in :mod:`partool.schedule` → its name."""


@dataclass(frozen=True)
class LeftOut:
    """The middle of a long step, which repeats the same pattern and is not simulated."""

    from_s: float
    to_s: float
    micro_batches: int


@dataclass(frozen=True)
class Drawing:
    """The timeline of a step: when each rank computes and sends."""

    name: str
    ranks: int
    micro_batches: int
    stages_per_pass: int
    """Number of stages that a rank runs on one micro-batch: the rank's stages, or all stages if ranks send weights."""
    boxes: tuple[TimedAction, ...]
    """Compute actions in the order in which they begin; micro-batches are numbered as in the whole step."""
    transfers: tuple[TimedAction, ...]
    """Sends, from departure to arrival of the data."""
    span_s: float
    """Seconds from the step's begin to the end of the last action, over all micro-batches."""
    busy_s: tuple[float, ...]
    """Seconds of compute per rank, over all micro-batches."""
    in_flight: tuple[int, ...]
    """For each rank, the maximum number of micro-batches (counted per stage) whose activations exist at once."""
    pale: frozenset[int]
    """Stages drawn in a lighter tone: every second stage of a rank."""
    left_out: LeftOut | None = None

    @property
    def bubble(self) -> float:
        """Return the share of the ranks' total time in which ranks do not compute, from 0 to 1."""
        return idle_share(self.busy_s, self.span_s)

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """(Letter, name) of each kind of compute action that occurs."""
        seen = {box.action.kind for box in self.boxes}
        return tuple((kind, words) for kind, words in KINDS.items() if kind in seen)


@dataclass(frozen=True)
class Window:
    """A part of a step that fits into one picture."""

    title: str
    from_s: float
    to_s: float
    at_end: bool = False
    """True if the window is at the end of the step, however long the step is."""

    def of(self, drawing: Drawing) -> Window:
        """Return this window for the step of ``drawing``; a window at the end is moved to that step's end."""
        if not self.at_end:
            return self
        return replace(self, from_s=drawing.span_s - (self.to_s - self.from_s), to_s=drawing.span_s)


def drawn(schedule: Schedule, timeline: Timeline) -> Drawing:
    """Return the drawing of a whole step from its simulated ``timeline``."""
    return Drawing(
        name=schedule.name,
        ranks=schedule.ranks,
        micro_batches=schedule.micro_batches,
        stages_per_pass=schedule.stages if schedule.moves == "weights" else schedule.chunks,
        boxes=timeline.events,
        transfers=timeline.transfers,
        span_s=timeline.makespan_s,
        busy_s=timeline.busy_s,
        in_flight=timeline.in_flight,
        pale=pale_stages(schedule),
    )


def undrawn(schedule: Schedule) -> Drawing:
    """Return a drawing of a schedule without boxes, transfers and times."""
    return Drawing(
        name=schedule.name,
        ranks=schedule.ranks,
        micro_batches=schedule.micro_batches,
        stages_per_pass=schedule.stages if schedule.moves == "weights" else schedule.chunks,
        boxes=(),
        transfers=(),
        span_s=0.0,
        busy_s=(0.0,) * schedule.ranks,
        in_flight=tuple(peak_held(actions) for actions in schedule.lists),
        pale=pale_stages(schedule),
    )


def pale_stages(schedule: Schedule) -> frozenset[int]:
    """Return the stages that are drawn in a lighter tone: every second stage of each rank.

    If weights move between ranks, each rank runs all stages, and every second stage of the model is returned.
    """
    if schedule.moves == "weights":
        return frozenset(range(1, schedule.stages, 2))
    return frozenset(stage for rank in range(schedule.ranks) for stage in schedule.on_rank(rank)[1::2])


def shown_rows(ranks: int, most: int) -> list[int]:
    """Return the ranks that are drawn: all, or the first and last ``most // 2`` if there are more than ``most``."""
    return list(range(ranks)) if ranks <= most else [*range(most // 2), *range(ranks - most // 2, ranks)]


def windows(drawing: Drawing, rows: Sequence[int], per_row: int) -> list[Window]:
    """Return a window on the whole step, or windows on both ends if a row has more than about ``per_row`` boxes."""
    kept = set(rows)
    boxes = [box for box in drawing.boxes if box.rank in kept]
    limit = per_row * len(rows)
    if len(boxes) <= 1.25 * limit and drawing.left_out is None:
        return [Window(f"The whole step: {counted(drawing.micro_batches, 'micro-batch')}", 0.0, drawing.span_s)]
    # Boxes at the end of the step have longer micro-batch numbers, which need more room.
    fewer = limit * 2 // max(len(str(drawing.micro_batches - 1)), 2)
    until_s = min(box.start_s for box in boxes[min(limit, len(boxes) - 1) :])
    from_s = sorted(box.stop_s for box in boxes)[max(len(boxes) - fewer - 1, 0)]
    if drawing.left_out is not None:
        until_s, from_s = min(until_s, drawing.left_out.from_s), max(from_s, drawing.left_out.to_s)
    return [
        Window(f"The first {seconds(until_s)}", 0.0, until_s),
        Window(f"The last {seconds(drawing.span_s - from_s)}", from_s, drawing.span_s, at_end=True),
    ]


def inside(drawing: Drawing, window: Window) -> list[TimedAction]:
    """Return the boxes of a drawing that overlap a window in time."""
    return [box for box in drawing.boxes if box.start_s < window.to_s and box.stop_s > window.from_s]

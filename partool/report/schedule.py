"""Output of ``partool schedule``: the list of all schedules, or one schedule as a picture, as numbers or as data."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.report.drawing import Drawing, drawn
from partool.report.terminal_timeline import render_timeline, summary
from partool.schedule import Schedule, StageTimes, cell, receive_depth, schedule_hash, simulate
from partool.strategies.schedules import SCHEDULES


def unit_times(schedule: Schedule, backward: float, send: float) -> StageTimes:
    """Return the times in units of a rank's forward pass; the weight gradients take half of a backward pass."""
    share = 1.0 / (schedule.stages / schedule.ranks)
    each = [share] * schedule.stages
    return StageTimes(each, [backward * share] * schedule.stages, None, send)


def messages(schedule: Schedule) -> dict[str, int]:
    """Return content of messages → number of such messages that all ranks together send in a step."""
    words = {"SEND_F": "activations", "SEND_B": "gradients of activations"}
    words |= {"SEND_FW": "weights", "SEND_BW": "weights", "SEND_G": "gradients of weights"}
    counts = Counter(words[a.kind] for actions in schedule.lists for a in actions if a.kind in words)
    return dict(counts)


def render_known(console: Console) -> None:
    """Print a table of the schedules that a spec can name."""
    table = Table(box=None, pad_edge=False)
    for heading in ("schedule", "stages per rank", "micro-batches", "what it does"):
        table.add_column(heading, no_wrap=heading == "schedule", header_style="bold")
    for name, record in SCHEDULES.items():
        table.add_row(name, record.stages, record.micro_batches, record.words)
    console.print(table)


def render_schedule(schedule: Schedule, drawing: Drawing, console: Console) -> None:
    """Print a schedule as a picture, with its activations and messages. Times are in units of a rank's forward pass."""
    console.print(Text(summary(drawing, ""), "bold"))
    render_timeline(drawing, console, unit="")
    sent = ", ".join(f"{count:,} of {what}" for what, count in messages(schedule).items()) or "none"
    console.print(
        Text(f"messages per step: {sent}; room for {receive_depth(schedule)} in flight per pair of ranks is enough")
    )


def schedule_data(schedule: Schedule, drawing: Drawing) -> dict[str, object]:
    """Return a schedule as data. Times are in units of a rank's forward pass."""
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "micro_batches": schedule.micro_batches,
        "stages_per_rank": schedule.chunks,
        "moves": schedule.moves,
        "placement": list(schedule.placement),
        "hash": schedule_hash(schedule),
        "makespan": drawing.span_s,
        "bubble": drawing.bubble,
        "activations": [passes / drawing.stages_per_pass for passes in drawing.in_flight],
        "messages": messages(schedule),
        "receive_depth": receive_depth(schedule),
        "lists": [[cell(action) for action in actions] for actions in schedule.lists],
    }


def in_units(schedule: Schedule, backward: float = 2.0, send: float = 0.0) -> Drawing:
    """Return a schedule's timeline. Its unit of time is a rank's forward pass; ``send`` is the time of one transfer.

    Raises ``ValueError`` if the action lists cannot finish.
    """
    return drawn(schedule, simulate(schedule, unit_times(schedule, backward, send)))

"""Timelines as files for trace viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partool.plan.terms import TIME_TERMS
from partool.plan.types import Plan
from partool.report.drawing import KINDS, Drawing
from partool.report.timeline import planned
from partool.schedule import TimedAction

TRACE_ACTIONS = 200_000
"""Maximum number of actions in a trace, as viewers grow slow; a longer step lacks its repetitive middle."""
_ARROWS = 20_000
"""Maximum number of transfers that are drawn as arrows; if there are more, all are left out."""
Trace = dict[str, object]


def plan_trace(plan: Plan) -> Trace:
    """Return one step in the Chrome trace format, which Perfetto and chrome://tracing open.

    Each pipeline rank has a row with its micro-batches; another row shows the terms of the step. Times are in µs.
    Raises ``ValueError`` if the plan's schedule cannot be made.
    Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    drawing = planned(plan, TRACE_ACTIONS)
    title = "forward and backward passes" if plan.layout.mesh.pp == 1 else f"pipeline ({drawing.name})"
    events = process(drawing, f"{plan.name}: {title}", 0)
    events += [_named("process_name", 1, 0, f"{plan.name}: step by term"), _named("thread_name", 1, 0, "terms")]
    at_s, terms_s = 0.0, plan.prediction.time.terms_s
    for name in TIME_TERMS:
        if (value_s := terms_s.get(name, 0.0)) > 0.0:
            events.append({"name": name, "ph": "X", "pid": 1, "tid": 0, **_span(at_s, at_s + value_s)})
            at_s += value_s
    about = {"plan": plan.name, "plan_hash": plan.hash, "partool_version": plan.partool_version}
    if drawing.left_out:
        skipped = drawing.left_out.micro_batches
        about["left_out"] = f"{skipped} micro-batches in the middle of the step, which repeat the same pattern"
    return trace(events, about)


def trace(events: list[Trace], about: Mapping[str, object]) -> Trace:
    """Return the content of a trace file with these events; viewers show ``about`` as metadata."""
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def process(drawing: Drawing, title: str, number: int) -> list[Trace]:
    """Return the events of a timeline, shown as process ``number``: a row per rank, and an arrow per transfer."""
    events = [_named("process_name", number, 0, title)]
    events.append({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
    events += [_named("thread_name", number, rank, f"pipeline rank {rank}") for rank in range(drawing.ranks)]
    events += [_complete(box, number, several=drawing.stages_per_pass > 1) for box in drawing.boxes]
    return events + (_arrows(drawing, number) if len(drawing.transfers) <= _ARROWS else [])


def _complete(box: TimedAction, number: int, *, several: bool) -> Trace:
    kind, stage, batch = box.action
    return {
        "name": f"{stage}{kind}{batch}" if several else f"{kind}{batch}",
        "cat": KINDS[kind],
        "ph": "X",
        "pid": number,
        "tid": box.rank,
        **_span(box.start_s, box.stop_s),
        "args": {"stage": stage, "micro_batch": batch},
    }


def _arrows(drawing: Drawing, number: int) -> list[Trace]:
    """Return the events of arrows; each arrow leads from the action that made a message to the action that needs it."""
    boxes: dict[tuple[str, int, int], TimedAction] = {}
    for box in drawing.boxes:
        kind, stage, batch = box.action
        boxes["B" if kind == "I" else kind, stage, batch] = box
    arrows: list[Trace] = []
    for index, send in enumerate(drawing.transfers):
        kind, stage, batch = send.action
        if kind in ("SEND_F", "SEND_B"):
            what, neighbour = ("F", stage + 1) if kind == "SEND_F" else ("B", stage - 1)
            tail, head = boxes.get((what, stage, batch)), boxes.get((what, neighbour, batch))
            if tail is not None and head is not None:
                arrows += _arrow(tail, head, number, f"{number}.{index}")
    return arrows


def _arrow(tail: TimedAction, head: TimedAction, number: int, identifier: str) -> Sequence[Trace]:
    common = {"name": "transfer", "cat": "transfer", "pid": number, "id": identifier}
    # A viewer ties an arrow to the box around its time; the exact end of a box is outside of it.
    return (
        {**common, "ph": "s", "tid": tail.rank, "ts": _us(0.25 * tail.start_s + 0.75 * tail.stop_s)},
        {**common, "ph": "f", "bp": "e", "tid": head.rank, "ts": _us(head.start_s)},
    )


def _named(what: str, process: int, thread: int, name: str) -> Trace:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(start_s: float, stop_s: float) -> dict[str, float]:
    """Return begin and duration of an action in the trace, in microseconds.

    Both ends are rounded to a nanosecond before they are subtracted, so that adjacent slices do not overlap.
    """
    start_ns, stop_ns = round(start_s * 1e9), round(stop_s * 1e9)
    return {"ts": start_ns / 1e3, "dur": (stop_ns - start_ns) / 1e3}


def _us(value_s: float) -> float:
    return round(value_s * 1e6, 3)

"""The schedule of a plan in time: what the report draws, and a file for trace viewers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partool.plan.terms import TIME_TERMS
from partool.plan.types import Plan
from partool.schedule import Event, Schedule, StageTimes, check, generate, makespan, simulate

KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Compute actions by the letter of :mod:`partool.schedule`."""
_TRACE_ACTIONS = 200_000
"""Actions above which a trace leaves out the middle of a step: viewers grow slow, and it only repeats."""
_WARM_ROUNDS = 3
"""Rounds of micro-batches (one per rank) in which a schedule fills, repeats and drains."""


@dataclass(frozen=True)
class Simulated:
    """A step's schedule in time; of a long one, its beginning and its end."""

    schedule: Schedule
    events: tuple[Event, ...]
    span_s: float
    """From the first to the last action, of all micro-batches."""
    bubble: float
    """Idle share of all ranks in that time."""
    skipped: int
    """Micro-batches left out of the middle."""
    skipped_s: float
    """Their time: what events of the end must be moved by."""
    in_flight: tuple[int, ...]
    """Per rank: most micro-batches (of one stage each) whose activations exist at once."""


def simulated(plan: Plan, most_actions: int) -> Simulated:
    """Return the plan's schedule in time, with about ``most_actions`` actions at most.

    Raises ``ValueError`` where the plan's schedule cannot be made.
    """
    layout, ranks = plan.layout, plan.layout.mesh.pp
    problem = check(layout.schedule, ranks, layout.accumulation, layout.chunks)
    if problem is None and len(layout.stages) != ranks * layout.chunks:
        problem = f"{len(layout.stages)} stages do not fill {ranks} ranks × {layout.chunks} chunks"
    if problem:
        raise ValueError(problem)
    times = _stage_times(plan)
    count = _shown(layout.accumulation, ranks, most_actions // (2 * len(layout.stages)))
    schedule = generate(layout.schedule, ranks, count, layout.chunks)
    timeline = simulate(schedule, times)
    skipped = layout.accumulation - count
    span_s = timeline.makespan_s
    if skipped:
        span_s = _span_s(plan, times)
    busy_s = sum(timeline.busy_s) / count * layout.accumulation
    return Simulated(
        schedule=schedule,
        events=timeline.events,
        span_s=span_s,
        bubble=max(0.0, 1.0 - busy_s / (ranks * span_s)) if span_s else 0.0,
        skipped=skipped,
        skipped_s=span_s - timeline.makespan_s,
        in_flight=timeline.in_flight,
    )


def timeline_json(plan: Plan) -> dict[str, Any]:
    """Return one step in the Chrome trace format, which Perfetto and chrome://tracing open.

    One row per pipeline rank with its micro-batches, and one with the step by term. Times are microseconds.
    Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    found = simulated(plan, _TRACE_ACTIONS)
    events = [_named("process_name", 0, 0, f"{plan.name}: pipeline ({plan.layout.schedule})")]
    events += [_named("thread_name", 0, rank, f"pipeline rank {rank}") for rank in range(found.schedule.ranks)]
    events += [_complete(found, event) for event in found.events]
    events += [_named("process_name", 1, 0, f"{plan.name}: step by term"), _named("thread_name", 1, 0, "terms")]
    at_s, terms_s = 0.0, plan.prediction.time.terms_s
    for name in TIME_TERMS:
        if (value_s := terms_s.get(name, 0.0)) > 0.0:
            events.append({"name": name, "ph": "X", "pid": 1, "tid": 0, "ts": _us(at_s), "dur": _us(value_s)})
            at_s += value_s
    about = {"plan": plan.name, "plan_hash": plan.hash, "partool_version": plan.partool_version}
    if found.skipped:
        about["left_out"] = f"{found.skipped} micro-batches in the middle of the step, which repeat the same pattern"
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def shift(found: Simulated, event: Event) -> tuple[float, int]:
    """Return by how many seconds and micro-batches an event moves: those after the part left out do."""
    last = event.start_s >= 0.5 * (found.span_s - found.skipped_s)
    return (found.skipped_s, found.skipped) if last else (0.0, 0)


def _complete(found: Simulated, event: Event) -> dict[str, Any]:
    kind, stage, batch = event.action
    late_s, later = shift(found, event)
    return {
        "name": f"{kind} {batch + later}",
        "cat": KINDS[kind],
        "ph": "X",
        "pid": 0,
        "tid": event.rank,
        "ts": _us(event.start_s + late_s),
        "dur": _us(event.stop_s - event.start_s),
        "args": {"stage": stage, "micro_batch": batch + later},
    }


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _us(value_s: float) -> float:
    return round(value_s * 1e6, 3)


def _shown(micro_batches: int, ranks: int, most: int) -> int:
    """Return how many micro-batches to follow: enough to fill and drain, and as far into a round as all of them."""
    least = max(_WARM_ROUNDS * ranks, most // ranks * ranks)
    return micro_batches if micro_batches <= least + ranks else least + (micro_batches - least) % ranks


def _stage_times(plan: Plan) -> StageTimes:
    """Price the stages again, with the figures that the plan holds."""
    from partool.cost.case import Job
    from partool.cost.predict import stage_times
    from partool.cost.stacks import own_stack

    job = Job(
        model=plan.model,
        devices=plan.devices,
        sequence_length=plan.training.sequence_length,
        global_batch=plan.training.global_batch,
        precision=plan.training.precision,
        stack=own_stack(plan.devices.backend, plan.layout.compile),
        frozen=plan.frozen,
        time_scalar=plan.prediction.time_scalar,
    )
    return stage_times(job, plan.layout)


def _span_s(plan: Plan, times: StageTimes) -> float:
    layout = plan.layout
    return float(
        makespan(
            layout.schedule,
            layout.mesh.pp,
            layout.accumulation,
            layout.chunks,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            weight_s=times.weight_s,
            send_s=times.send_s,
        )
    )

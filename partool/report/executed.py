"""Reads a pipeline's step from the ranks' logs, aligns the ranks' clocks, and compares the step with simulations."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from partool.plan.pipeline_log import Executed, ExecutedStep
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.report.drawing import Drawing, drawn, undrawn
from partool.report.logged import Logged, NothingExecutedError, Ranks, any_logged, logged_steps, told_schedule
from partool.report.timeline import predicted_times
from partool.schedule import (
    COMPUTE,
    Schedule,
    StageTimes,
    TimedAction,
    peer,
    simulate,
    without_backward,
)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a step on one pipeline rank, split into compute, waiting and other; the sum is the step's span."""

    compute_s: float
    waiting_s: float
    """Seconds of waiting for inputs from other stages and, at the end, for the rank that finishes last."""
    other_s: float
    """All other seconds: gathers and reductions, starting transfers, and work of the host."""


@dataclass(frozen=True)
class Comparison:
    """An executed step, simulations of the step's schedule, and measured and predicted times of the stages."""

    step: int
    picked: bool
    """True if the user chose this step; else it is the step of median length."""
    steps: tuple[int, ...]
    """Numbers of all logged steps that followed the plan of this step, without the first steps of each attempt."""
    attempt: int
    plan: Plan | None
    """Plan that the step's attempt followed; None if the plan is not kept, so that nothing can be simulated."""
    earlier: bool
    """True if ``plan`` is not the run's current plan."""
    schedule: Schedule
    executed: Drawing
    simulated: Drawing | None
    """Simulation of the schedule with the measured times of stages and transfers; None without a plan."""
    predicted: Drawing | None
    """Simulation of the schedule with the plan's predicted times; None without a plan."""
    ranks: tuple[RankTimes, ...]
    """Times of each rank in the executed step."""
    measured: StageTimes
    planned: StageTimes | None


def compare(run_dir: Path, plan: Plan, pipeline: int = 0, step: int | None = None) -> Comparison:
    """Return the comparison of a pipeline's executed step with simulations; by default the step of median length.

    ``plan`` is the run's current plan; a step of an earlier plan is compared with that plan. ``pipeline`` is the number
    of the data-parallel replica. Raises :class:`NothingExecutedError`.
    """
    steps = logged_steps(run_dir, plan, pipeline)
    number = _chosen(run_dir, plan, steps) if step is None else step
    if number not in steps:
        if not steps:
            raise NothingExecutedError(_nothing(run_dir, plan))
        numbers = ", ".join(map(str, sorted(steps)))
        raise NothingExecutedError(f"the timeline of step {number} was not logged; logged: {numbers}")
    logged = steps[number]
    its_plan = logged.plan
    schedule = told_schedule(logged.ranks) if its_plan is None else executed_schedule(its_plan, logged.ranks)
    moved = aligned(schedule, logged.ranks)
    measured = measured_times(schedule, moved)
    planned = predicted_times(its_plan) if its_plan is not None else None
    simulated = drawn(schedule, simulate(schedule, measured)) if its_plan is not None else None
    executed = executed_drawing(schedule, moved, simulated or undrawn(schedule))
    alike = {number: one.ranks for number, one in steps.items() if one.plan is its_plan}
    return Comparison(
        step=number,
        picked=step is not None,
        steps=tuple(sorted(_usual_kind(alike))),
        attempt=logged.attempt,
        plan=its_plan,
        earlier=logged.earlier,
        schedule=schedule,
        executed=executed,
        simulated=simulated,
        predicted=drawn(schedule, simulate(schedule, planned)) if planned is not None else None,
        ranks=tuple(_rank_times(moved[rank], executed, rank) for rank in range(schedule.ranks)),
        measured=measured,
        planned=planned,
    )


def _chosen(run_dir: Path, plan: Plan, steps: Mapping[int, Logged]) -> int:
    """Return the number of the step of median length among the steps that followed the current plan."""
    mine = {number: one.ranks for number, one in steps.items() if not one.earlier}
    if mine:
        return _usual(_usual_kind(mine))
    earlier = f"; --step shows those of an earlier plan: {', '.join(map(str, sorted(steps)))}" if steps else ""
    raise NothingExecutedError(_nothing(run_dir, plan) + earlier)


def _nothing(run_dir: Path, plan: Plan) -> str:
    if plan.layout.mesh.pp == 1:
        return "the run has no pipeline"
    what = "some of its ranks have logged none" if any_logged(run_dir, plan) else "there is none in the logs yet"
    return f"no step's timeline is known: {what}"


def _usual_kind(steps: Mapping[int, Ranks]) -> Mapping[int, Ranks]:
    """Return the steps without the first steps of each attempt; return all steps if no step would remain."""
    return {number: ranks for number, ranks in steps.items() if _steady(ranks)} or steps


def executed_schedule(plan: Plan, ranks: Ranks) -> Schedule:
    """Return the plan's schedule without the backward passes of frozen stages, which is what the step ran."""
    schedule = schedule_of(plan.layout)
    trained = [one.action.stage for step in ranks.values() for one in step.actions if one.action.kind in "BI"]
    first = min(trained, default=schedule.stages)
    return without_backward(schedule, first) if first > schedule.trained_from else schedule


def aligned(schedule: Schedule, ranks: Ranks) -> Ranks:
    """Return each rank's actions in a step, with times in seconds since the first rank began, on a common clock.

    Clocks of one machine agree. If a message seems to arrive before it is sent, the receiver's clock is behind, and is
    moved by half the difference of the shortest transfer times in both directions, as in NTP (RFC 5905, section 8).
    """
    ahead_s = _clock_offsets(schedule, ranks)
    begins = {rank: step.unix_s - ahead_s[rank] for rank, step in ranks.items()}
    zero = min(begins.values())
    return {rank: _moved(step, begins[rank] - zero, zero) for rank, step in ranks.items()}


def measured_times(schedule: Schedule, ranks: Ranks) -> StageTimes:
    """Return the measured seconds of each stage per micro-batch, and of each transfer, in a step.

    A stage's time is the mean over micro-batches, so that a simulation computes for as long as the ranks did.
    """
    took: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for step in ranks.values():
        for one in step.actions:
            if one.action.kind in COMPUTE:
                took[one.action.kind, one.action.stage].append(one.stop_s - one.start_s)
    ways: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    gradients: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for pair, kind, way_s in _ways(schedule, ranks):
        (gradients if kind == "SEND_G" else ways)[pair].append(max(way_s, 0.0))
    mean = {key: statistics.fmean(each) for key, each in took.items()}
    stages = range(schedule.stages)
    forward, backward, inputs, weights = ([mean.get((kind, stage), 0.0) for stage in stages] for kind in "FBIW")
    halved = any(kind == "W" for kind, _ in took)
    return StageTimes(
        forward_s=forward,
        backward_s=[backward[stage] or inputs[stage] + weights[stage] for stage in stages],
        weight_s=weights if halved else None,
        send_s=_each(schedule, ways),
        input_s=inputs if halved else None,
        gradient_send_s=_each(schedule, gradients) if gradients else None,
    )


def executed_drawing(schedule: Schedule, ranks: Ranks, simulated: Drawing) -> Drawing:
    """Return the drawing of an executed step, comparable to a simulated drawing; the ranks' clocks must be aligned."""
    events = [
        TimedAction(rank, one.action, one.start_s, one.stop_s)
        for rank, step in ranks.items()
        for one in step.actions
        if one.action.kind in COMPUTE
    ]
    boxes = tuple(sorted(events, key=lambda event: (event.start_s, event.rank)))
    arrived = {(rank, one.action): one.stop_s for rank, step in ranks.items() for one in step.actions}
    sends = [
        TimedAction(rank, one.action, one.start_s, arrived.get(peer(schedule, rank, one.action), one.stop_s))
        for rank, step in ranks.items()
        for one in step.actions
        if one.action.kind.startswith("SEND")
    ]
    busy_s = [0.0] * schedule.ranks
    for box in boxes:
        busy_s[box.rank] += box.stop_s - box.start_s
    return replace(
        simulated,
        boxes=boxes,
        transfers=tuple(sorted(sends, key=lambda event: event.start_s)),
        span_s=max((_end_s(step) for step in ranks.values()), default=0.0),
        busy_s=tuple(busy_s),
    )


def _steady(ranks: Ranks) -> bool:
    return all(step.steady for step in ranks.values())


def _span_s(ranks: Ranks) -> float:
    ends = [step.unix_s + _end_s(step) for step in ranks.values()]
    return max(ends) - min(step.unix_s for step in ranks.values())


def _end_s(step: ExecutedStep) -> float:
    """Return the time in seconds at which a rank's last compute action (with WeiPipe, last receive) ends."""
    return max((one.stop_s for one in step.actions if not one.action.kind.startswith("SEND")), default=0.0)


def _usual(steps: Mapping[int, Ranks]) -> int:
    """Return the number of the step of median length."""
    ordered = sorted(steps, key=lambda step: _span_s(steps[step]))
    return ordered[len(ordered) // 2]


def _rank_times(step: ExecutedStep, executed: Drawing, rank: int) -> RankTimes:
    """Return a rank's times; the time before its first action and after its last compute action counts as waiting."""
    compute_s = executed.busy_s[rank]
    waited_s = sum(max(one.waited_s, 0.0) for one in step.actions if one.action.kind in COMPUTE)
    first_s = min((one.start_s - one.waited_s for one in step.actions), default=0.0)
    last_s = max((one.stop_s for one in step.actions if one.action.kind in COMPUTE), default=0.0)
    waiting_s = waited_s + max(first_s, 0.0) + executed.span_s - last_s
    return RankTimes(compute_s, waiting_s, max(0.0, executed.span_s - compute_s - waiting_s))


def _moved(step: ExecutedStep, late_s: float, zero_unix_s: float) -> ExecutedStep:
    """Return a step with the new time 0 ``zero_unix_s``, by adding ``late_s`` seconds to the times of its actions."""
    actions = tuple(
        Executed(one.action, one.start_s + late_s, one.stop_s + late_s, one.waited_s) for one in step.actions
    )
    return replace(step, unix_s=zero_unix_s, actions=actions)


def _ways(schedule: Schedule, ranks: Ranks) -> Iterable[tuple[tuple[int, int], str, float]]:
    """Yield ((sending rank, receiving rank), kind of the send, transfer time in seconds) of each message."""
    arrival_s = {
        (rank, one.action): step.unix_s + one.stop_s
        for rank, step in ranks.items()
        for one in step.actions
        if one.action.kind.startswith("RECV")
    }
    for rank, step in ranks.items():
        for one in step.actions:
            if one.action.kind.startswith("SEND"):
                other = peer(schedule, rank, one.action)
                if other in arrival_s:
                    yield (rank, other[0]), one.action.kind, arrival_s[other] - step.unix_s - one.start_s


def _each(schedule: Schedule, ways: Mapping[tuple[int, int], list[float]]) -> dict[tuple[int, int], float]:
    """Return (sending rank, receiving rank) → the usual seconds of a transfer.

    The value is the median of the fastest quarter of a pair's messages, because a rank notices an early message only
    when the rank needs it. Pairs without messages get the median of the other pairs.
    """
    medians = {pair: statistics.median(sorted(each)[: max(1, len(each) // 4)]) for pair, each in ways.items()}
    usual = statistics.median(medians.values()) if medians else 0.0
    pairs = {
        (rank, peer(schedule, rank, action)[0])
        for rank, actions in enumerate(schedule.lists)
        for action in actions
        if action.kind.startswith("SEND")
    }
    return {pair: medians.get(pair, usual) for pair in pairs}


def _clock_offsets(schedule: Schedule, ranks: Ranks) -> dict[int, float]:
    """Return rank → seconds between the clocks of this rank and rank 0; 0 unless messages prove a difference."""
    shortest: dict[tuple[int, int], float] = {}
    for pair, _, way_s in _ways(schedule, ranks):
        shortest[pair] = min(way_s, shortest.get(pair, way_s))
    ahead_s, reached = dict.fromkeys(ranks, 0.0), [min(ranks)]
    for rank in reached:
        for other in sorted(ranks.keys() - reached):
            onward_s, back = shortest.get((rank, other)), shortest.get((other, rank))
            if onward_s is None or back is None:
                continue
            wrong = min(onward_s, back) < 0.0
            ahead_s[other] = ahead_s[rank] + (0.5 * (onward_s - back) if wrong else 0.0)
            reached.append(other)
    return ahead_s

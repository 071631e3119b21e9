"""Make the timelines of plans' schedules for the reports."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.report.drawing import Drawing, LeftOut, drawn
from partool.report.units import seconds
from partool.schedule import StageTimes, TimedAction, generate, in_flight, simulate
from partool.schedule.transform import forward_only
from partool.strategies.jobs import JOBS
from partool.strategies.schedules import SCHEDULES

if TYPE_CHECKING:
    from partool.work.training import TrainingWork

_REPEAT = tuple(name for name, record in SCHEDULES.items() if record.repeats)
"""Names of schedules whose action lists begin and end alike for few and for many micro-batches."""
_WARM_ROUNDS = 3
"""Number of rounds (one micro-batch per rank each) in which a schedule of ``_REPEAT`` fills, repeats and drains."""


def planned(plan: Plan, most_actions: int) -> Drawing:
    """Return the timeline of a plan's schedule; a repeating schedule is cut to about ``most_actions`` actions.

    Raises ``ValueError`` if the plan's schedule cannot be made.
    """
    layout, ranks = plan.layout, plan.layout.mesh.pp
    times = predicted_times(plan)
    m, stages = layout.derived.accumulation, len(layout.pipeline.bounds)
    if layout.pipeline.schedule != "file" and stages != ranks * layout.pipeline.chunks:
        raise ValueError(f"{stages} stages do not fill {ranks} ranks × {layout.pipeline.chunks} chunks")
    if not JOBS[plan.job].backward:
        schedule = forward_only(schedule_of(layout))
        return drawn(schedule, simulate(schedule, times))
    count = _shown(m, ranks, most_actions // (2 * stages)) if layout.pipeline.schedule in _REPEAT else m
    if count == m:
        schedule = schedule_of(layout)
        if schedule.stages != stages:
            raise ValueError(f"the lists have {schedule.stages} stages, the layout {stages}")
        return drawn(schedule, simulate(schedule, times))
    from partool.cost.time.pipeline import span_s

    schedule = generate(layout.pipeline.schedule, ranks, count, layout.pipeline.chunks)
    short = _stretched(drawn(schedule, simulate(schedule, times)), m, span_s(layout, times))
    return replace(short, in_flight=in_flight(layout.pipeline.schedule, ranks, m, layout.pipeline.chunks))


def without_pipeline(plan: Plan) -> str:
    """Return a sentence that says that a plan has no pipeline; empty if the plan has one."""
    if plan.layout.mesh.pp > 1:
        return ""
    k = plan.layout.derived.accumulation
    batches = f"{k} micro-batches, one after the other" if k > 1 else "one micro-batch"
    passes = "forward then backward" if JOBS[plan.job].backward else "forward"
    return f"No pipeline: every rank runs all layers on {batches}, {passes}."


def predicted_times(plan: Plan) -> StageTimes:
    """Return the predicted seconds of each stage, recomputed with the figures in the plan."""
    from partool.cost.training.predict import stage_times

    return stage_times(_job(plan), plan.layout)


def bubble_words(plan: Plan, drawing: Drawing) -> str:
    """Return a text on how the term ``pipeline_bubble`` follows from a plan's timeline.

    Ranks that share cores also wait for each other; the timeline does not show these waits.
    """
    term_s, idle_s = plan.prediction.time.terms_s.get("pipeline_bubble", 0.0), drawing.span_s - max(drawing.busy_s)
    if not shares_cores(plan):
        return f"The term pipeline_bubble, {seconds(term_s)}, is the idle time of the busiest rank alone."
    waits = seconds(max(term_s - idle_s, 0.0))
    return (
        f"The term pipeline_bubble, {seconds(term_s)}, is the idle time of the busiest rank here, {seconds(idle_s)}, "
        f"and {waits} that it waits because ranks share cores, which the timeline leaves out."
    )


def shares_cores(plan: Plan) -> bool:
    """Return True if ranks of the pipeline wait for each other's cores, which a timeline does not show."""
    from partool.cost.codec import encode
    from partool.cost.training.sync import pipeline_wait

    return plan.layout.mesh.pp > 1 and float(pipeline_wait(_job(plan), encode(plan.layout))) > 0.0


def _job(plan: Plan) -> TrainingWork:
    from partool.work.distillation import with_teacher
    from partool.work.evaluation import forward_only
    from partool.work.stacks import stack_of
    from partool.work.training import TrainingWork

    work = TrainingWork(
        model=plan.model,
        devices=plan.devices,
        sequence_length=plan.training.sequence_length,
        global_batch=plan.training.global_batch,
        precision=plan.training.precision,
        stack=stack_of(plan.engine, plan.devices.backend, plan.layout.compile, plan.layout.derived.fused),
        frozen=plan.priced_frozen,
        perturbed=plan.training.adversarial.share(plan.training.steps),
        time_scalar=plan.prediction.time_scalar,
        expert_rank_capacity=plan.layout.expert_rank_capacity,
    )
    work = with_teacher(work, None if plan.teacher is None else plan.teacher.model, plan.training)
    return work.with_objective(plan.training.objective) if JOBS[plan.job].backward else forward_only(work)


def _stretched(short: Drawing, micro_batches: int, span_s: float) -> Drawing:
    """Return the drawing of a longer step: the second half of ``short`` moved later, and a gap between the halves."""
    more, late_s = micro_batches - short.micro_batches, span_s - short.span_s
    half_s = 0.5 * short.span_s

    def moved(events: tuple[TimedAction, ...]) -> tuple[TimedAction, ...]:
        return tuple(
            event
            if event.start_s < half_s
            else replace(
                event,
                action=event.action._replace(micro_batch=event.action.micro_batch + more),
                start_s=event.start_s + late_s,
                stop_s=event.stop_s + late_s,
            )
            for event in events
        )

    return replace(
        short,
        micro_batches=micro_batches,
        boxes=moved(short.boxes),
        transfers=moved(short.transfers),
        span_s=span_s,
        busy_s=tuple(busy / short.micro_batches * micro_batches for busy in short.busy_s),
        left_out=LeftOut(half_s, half_s + late_s, more),
    )


def _shown(micro_batches: int, ranks: int, most: int) -> int:
    """Return the number of micro-batches to simulate.

    The number is enough to fill and drain the pipeline, and ends at the same point of a round as ``micro_batches``.
    """
    least = max(_WARM_ROUNDS * ranks, most // ranks * ranks)
    return micro_batches if micro_batches <= least + ranks else least + (micro_batches - least) % ranks

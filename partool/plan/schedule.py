"""Make the schedule that a layout names (one list of actions per rank), and find the rank of each stage."""

from __future__ import annotations

from functools import lru_cache

from partool.plan.layout import Layout
from partool.schedule import Schedule, check, from_text, generate, rank_of, schedule_hash
from partool.strategies.schedules import SCHEDULES

ENDS_WITH_ONE = frozenset(name for name, record in SCHEDULES.items() if record.one_at_the_end)
"""Names of the schedules in which a fused loss may compute the gradients. In other schedules, gradients wait for passes
of other micro-batches; prices assume this also for the user's action lists."""
MOST_SEALED = 50_000
"""Maximum number of passes of a schedule for which plans store its hash."""


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout; raises ``ValueError`` if it cannot be made or is not the planned schedule."""
    schedule = _made(layout)
    if layout.derived.schedule_hash and schedule_hash(schedule) != layout.derived.schedule_hash:
        raise ValueError(
            f"{layout.pipeline.schedule} is not the planned one: the plan was edited, or is of another version"
        )
    return schedule


def sealed(layout: Layout) -> Layout:
    """Return the layout, with the hash of its schedule if it has a pipeline; only a schedule with this hash may run.

    Schedules of more than :data:`MOST_SEALED` passes are identified by their sizes alone: generating them takes
    seconds.
    """
    short = 2 * len(layout.pipeline.bounds) * layout.derived.accumulation <= MOST_SEALED
    seal = schedule_hash(_made(layout)) if layout.mesh.pp > 1 and short else ""
    return layout.changed({"derived.schedule_hash": seal})


def sizes_of(layout: Layout) -> tuple[str, int, int, int, int]:
    """Return the schedule's name, its ranks, micro-batches, chunks per rank and bound of micro-batches in flight."""
    pipeline = layout.pipeline
    return pipeline.schedule, pipeline.stages, layout.derived.accumulation, pipeline.chunks, pipeline.in_flight


def refuses(layout: Layout, micro_batches: int) -> str | None:
    """Return why the schedule of a layout cannot have ``micro_batches`` micro-batches; None if it can."""
    if layout.mesh.pp == 1:
        return None
    if layout.pipeline.schedule == "file":
        wanted = read(layout.derived.schedule_text).micro_batches
        return None if wanted == micro_batches else f"the schedule's file has {wanted} micro-batches"
    return check(
        layout.pipeline.schedule, layout.mesh.pp, micro_batches, layout.pipeline.chunks, layout.pipeline.in_flight
    )


def placement_of(layout: Layout) -> tuple[int, ...]:
    """Return the pipeline rank of each stage; if weights are sent, the rank of the stage's owner."""
    if layout.mesh.pp == 1:
        return (0,) * len(layout.pipeline.bounds)
    if layout.pipeline.schedule == "file":
        return read(layout.derived.schedule_text).placement
    return _placement(layout.pipeline.schedule, layout.mesh.pp, len(layout.pipeline.bounds))


def splits_backward(schedule: Schedule) -> bool:
    """Return True if a backward pass is split into input and weight gradients; then stages cannot be compiled."""
    return any(action.kind == "W" for actions in schedule.lists for action in actions)


@lru_cache(maxsize=4)
def read(text: str) -> Schedule:
    """Return the schedule that a layout stores as text; results are cached, as pricing reads the text repeatedly."""
    return from_text(text)


@lru_cache(maxsize=1024)
def _placement(name: str, ranks: int, stages: int) -> tuple[int, ...]:
    return tuple(rank_of(name, stage, ranks) for stage in range(stages))


def _made(layout: Layout) -> Schedule:
    if layout.pipeline.schedule == "file":
        return read(layout.derived.schedule_text)
    return generate(*sizes_of(layout))

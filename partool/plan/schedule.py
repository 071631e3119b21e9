"""The schedule that a layout names, as lists of actions, and where it puts the stages."""

from __future__ import annotations

from functools import lru_cache

from partool.plan.types import Layout
from partool.schedule import SCHEDULES, Schedule, from_text, generate, schedule_hash


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout; raises ``ValueError`` where it cannot be made or is not the planned one."""
    schedule = _made(layout)
    if layout.schedule_hash and schedule_hash(schedule) != layout.schedule_hash:
        raise ValueError(
            f"the schedule {layout.schedule} is not the one that was planned: the plan is of another version"
        )
    return schedule


def sealed(layout: Layout) -> Layout:
    """Return the layout with the hash of its schedule, if it has a pipeline: what was planned is then what runs."""
    found = schedule_hash(_made(layout)) if layout.mesh.pp > 1 else ""
    return layout.model_copy(update={"schedule_hash": found})


def placement_of(layout: Layout) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, without making the lists; where weights travel, of its owner."""
    if layout.mesh.pp == 1:
        return (0,) * len(layout.stages)
    if layout.schedule == "file":
        return read(layout.schedule_text).placement
    return _placement(layout.schedule, layout.mesh.pp, len(layout.stages))


@lru_cache(maxsize=4)
def read(text: str) -> Schedule:
    """Return the schedule of the user's own that a layout carries; prices ask for it time and again."""
    return from_text(text)


@lru_cache(maxsize=1024)
def _placement(name: str, ranks: int, stages: int) -> tuple[int, ...]:
    return tuple(SCHEDULES[name].rank_of(stage, ranks) for stage in range(stages))


def _made(layout: Layout) -> Schedule:
    if layout.schedule == "file":
        return read(layout.schedule_text)
    return generate(layout.schedule, layout.mesh.pp, layout.accumulation, layout.chunks, layout.in_flight)

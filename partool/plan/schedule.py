"""The schedule that a layout names, as lists of actions."""

from __future__ import annotations

from partool.plan.types import Layout
from partool.schedule import Schedule, from_text, generate, schedule_hash


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout; raises ``ValueError`` where it cannot be made or is not the planned one."""
    if layout.schedule == "file":
        schedule = from_text(layout.schedule_text)
    else:
        schedule = generate(layout.schedule, layout.mesh.pp, layout.accumulation, layout.chunks, layout.in_flight)
    if layout.schedule_hash and schedule_hash(schedule) != layout.schedule_hash:
        raise ValueError(
            f"the schedule {layout.schedule} is not the one that was planned: the plan is of another version"
        )
    return schedule

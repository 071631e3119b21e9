"""What a layout's schedule means for its ranks: which stages each has, how long the lists take, what they keep."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from partool.plan.schedule import placement_of, read
from partool.plan.types import Layout
from partool.schedule import SCHEDULES, StageTimes, in_flight, makespan
from partool.schedule import span_s as span_of_lists_s
from partool.schedule.simulate import peak_held


def stages_of_ranks(layout: Layout) -> list[list[int]]:
    """Return the stages of each pipeline rank; where weights travel, those that it owns."""
    found: list[list[int]] = [[] for _ in range(layout.mesh.pp)]
    for stage, rank in enumerate(placement_of(layout)):
        found[rank].append(stage)
    return found


def moves_weights(layout: Layout) -> bool:
    """Return True if weights go round the ranks, and each micro-batch stays on one of them."""
    known = SCHEDULES.get(layout.schedule)
    return layout.mesh.pp > 1 and known is not None and known.moves == "weights"


def span_s(layout: Layout, times: StageTimes) -> float:
    """Return the seconds from the first to the last action of a layout's schedule."""
    if layout.schedule == "file":
        return span_of_lists_s(read(layout.schedule_text), times)
    weight = times.weight_s if times.weight_s is not None else [0.5 * value for value in times.backward_s]
    return float(
        makespan(
            layout.schedule,
            layout.mesh.pp,
            layout.accumulation,
            layout.chunks,
            layout.in_flight,
            forward_s=np.array(times.forward_s),
            backward_s=np.array(times.backward_s),
            weight_s=np.array(weight),
            send_s=times.send_s,
        )
    )


def held_by_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the most activations that each pipeline rank holds at once, in micro-batches of one stage."""
    if layout.mesh.pp == 1:
        return (1,)
    if layout.schedule == "file":
        return _held(layout.schedule_text)
    return in_flight(layout.schedule, layout.mesh.pp, layout.accumulation, layout.chunks, layout.in_flight)


@lru_cache(maxsize=4)
def _held(text: str) -> tuple[int, ...]:
    return tuple(peak_held(actions) for actions in read(text).lists)

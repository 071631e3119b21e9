"""Activations that ranks hold while more and more of their stages have gradients, counted from action lists.

Where stages run back and forth over the ranks, the first micro-batches' backward passes reach a rank's stages at
different times: most activations exist before most of the gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from partool.schedule.actions import Action
from partool.schedule.generators import order, rank_of
from partool.schedule.graph import growth
from partool.schedule.makespan import in_flight


class Begun(NamedTuple):
    """A moment of a rank: numbers of its stages that have gradients, and of activations (one stage, one micro-batch).

    It is the moment with most activations among those with this number of stages.
    """

    stages: int
    activations: int
    local_inputs: int
    """Activations whose inputs are no messages: those of the first stage, and of stages after another of the rank."""
    ending: int
    """Activations of the pipeline's last stage."""


def moments_of(actions: Sequence[Action], first_inputs: Collection[int], last: int) -> list[Begun]:
    """Return a moment per number of stages that have gradients.

    ``first_inputs`` are stages whose inputs are no messages. A stage has gradients after its first
    backward pass, or where that is split, after its first weight gradients.
    """
    split = {(stage, batch) for kind, stage, batch in actions if kind == "W"}
    live: Counter[int] = Counter()
    activations = local_inputs = 0
    begun: set[int] = set()
    peaks: dict[int, Begun] = {}
    for kind, stage, batch in actions:
        ends = kind == "W" or (kind == "B" and (stage, batch) not in split)
        change = 1 if kind == "F" else -1 if ends else 0
        live[stage] += change
        activations, local_inputs = activations + change, local_inputs + change * (stage in first_inputs)
        if ends:
            begun.add(stage)
        now = Begun(len(begun), activations, local_inputs, live[last])
        before = peaks.setdefault(now.stages, now)
        if (now.activations, now.ending) > (before.activations, before.ending):
            peaks[now.stages] = now
    return [peaks[stages] for stages in sorted(peaks)]


@lru_cache(maxsize=256)
def begun_by_ranks(name: str, ranks: int, micro_batches: int, chunks: int, cap: int) -> tuple[tuple[Begun, ...], ...]:
    """Return each rank's moments by number of stages that have gradients; all its stages have them at the last one.

    What repeats in a schedule does not change the moments before that; so only a few rounds of micro-batches are
    looked at, and the last moment has as many activations as the schedule ever holds at once.
    """
    by, enough = growth(name, ranks, micro_batches, chunks), 4 * ranks
    few = micro_batches if micro_batches <= enough else enough + (micro_batches - enough) % by
    lists, stages = order(name, ranks, few, chunks, cap), ranks * chunks
    places = [rank_of(name, stage, ranks) for stage in range(stages)]
    most = in_flight(name, ranks, micro_batches, chunks, cap)
    by_rank = []
    for rank, actions in enumerate(lists):
        first_inputs = {stage for stage in range(stages) if stage == 0 or places[stage - 1] == places[stage]}
        moments = moments_of(actions, first_inputs, stages - 1)
        if few < micro_batches:
            moments[-1] = moments[-1]._replace(activations=max(most[rank], moments[-1].activations))
        by_rank.append(tuple(moments))
    return tuple(by_rank)

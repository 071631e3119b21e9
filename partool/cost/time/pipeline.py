"""Effect of a layout's schedule on its ranks: stages, duration of the action lists, memory and messages.

Where weights are sent around a ring of ranks (WeiPipe, Lin et al., PPoPP'25), each rank runs all stages on the
micro-batches assigned to it, keeps the state of some stages, and has the embedding and the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import HALVED_RING, Column, Layouts
from partool.cost.case import SCHEDULES as NAMES
from partool.cost.codec import encode
from partool.cost.kinds import layer_places
from partool.cost.memory.rank_parameters import WeightRing
from partool.cost.sequence import shares as sequence_shares
from partool.cost.tensor_shares import share_columns
from partool.plan.layout import Layout
from partool.plan.schedule import placement_of, read, schedule_of, sizes_of
from partool.schedule import Schedule, StageTimes, in_flight, layers_in_flight, makespan
from partool.schedule import span_s as span_of_lists_s
from partool.schedule.simulate import peak_held
from partool.schedule.transform import forward_only
from partool.schedule.weipipe import room, volume
from partool.strategies.schedules import SCHEDULES
from partool.work.base import Workload


def stages_of_ranks(layout: Layout) -> list[list[int]]:
    """Return the stages that each pipeline rank runs, or if ranks pass weights on, the stages whose state it owns."""
    stages: list[list[int]] = [[] for _ in range(layout.mesh.pp)]
    for stage, rank in enumerate(placement_of(layout)):
        stages[rank].append(stage)
    return stages


def moves_weights(layout: Layout) -> bool:
    """Return True if weights are passed around the ranks, and each micro-batch stays on one rank."""
    record = SCHEDULES.get(layout.pipeline.schedule)
    return layout.mesh.pp > 1 and record is not None and record.moves == "weights"


def worked_by_ranks(layout: Layout, values: Sequence[float]) -> list[float]:
    """Return each rank's sum of ``values`` (one per stage) over its stages; the mean sum if ranks pass weights on."""
    if moves_weights(layout):
        return [sum(values) / layout.mesh.pp] * layout.mesh.pp
    return [sum(values[stage] for stage in stages) for stages in stages_of_ranks(layout)]


def span_s(layout: Layout, times: StageTimes, *, backward: bool = True) -> float:
    """Return the seconds from the start of the first action to the end of the last action of a layout's schedule.

    Without ``backward`` the schedule has forward passes only.
    """
    if not backward:
        return span_of_lists_s(forward_only(schedule_of(layout)), times)
    if layout.pipeline.schedule == "file":
        return span_of_lists_s(read(layout.derived.schedule_text), times)
    weight = times.weight_s if times.weight_s is not None else [0.5 * value for value in times.backward_s]
    return float(
        makespan(
            layout.pipeline.schedule,
            layout.mesh.pp,
            layout.derived.accumulation,
            layout.pipeline.chunks,
            layout.pipeline.in_flight,
            forward_s=np.array(times.forward_s),
            backward_s=np.array(times.backward_s),
            weight_s=np.array(weight),
            send_s=times.send_s,
            gradient_send_s=times.gradient_send_s,
        )
    )


def activations_by_ranks(layout: Layout) -> tuple[int, ...]:
    """Return the maximum number of activations (of one micro-batch and stage) that each pipeline rank holds at once."""
    if layout.mesh.pp == 1:
        return (1,)
    if layout.pipeline.schedule == "file":
        return _peak_activations(layout.derived.schedule_text)
    return in_flight(*sizes_of(layout))


def layers_by_ranks(layout: Layout) -> tuple[float, ...]:
    """Return, for each pipeline rank, the layers per activation when it holds the activations of most layers."""
    layers = tuple(stop - start for start, stop in layout.pipeline.bounds)
    stages = stages_of_ranks(layout)
    even = all(len({layers[stage] for stage in mine}) == 1 for mine in stages)
    if even or layout.pipeline.schedule == "file" or moves_weights(layout):
        return tuple(sum(layers[stage] for stage in mine) / len(mine) for mine in stages)
    return layers_in_flight(sizes_of(layout), layers)


@lru_cache(maxsize=4)
def _peak_activations(text: str) -> tuple[int, ...]:
    return tuple(peak_held(actions) for actions in read(text).lists)


def stage_elements(job: Workload, layout: Layout) -> list[int]:
    """Return the number of parameters in each stage's layers on one tensor rank; a message of weights holds all."""
    shares = share_columns(job, encode(layout))
    layers = [int(sum(shares.layers[place])) for place in layer_places(job.model)]
    return [sum(layers[start:stop]) for start, stop in layout.pipeline.bounds]


def sent_bytes(job: Workload, layout: Layout, gradient_bytes: int) -> int:
    """Return the bytes that the busiest pipeline rank sends to other ranks of its pipeline per step.

    For activations and gradients this is one message of ``micro_batch × sequence × hidden`` per micro-batch and pair of
    neighbouring stages on different ranks, in each direction. For weights see :func:`partool.schedule.weipipe.volume`:
    with them, ranks pass on their gradients, of ``gradient_bytes`` per element.
    """
    if layout.mesh.pp == 1:
        return 0
    if moves_weights(layout):
        return _sent_weights_bytes(job, layout, gradient_bytes)
    return messages(job, layout) * boundary_bytes(job, layout)


def messages(job: Workload, layout: Layout) -> int:
    """Return how many messages (activations, gradients) a pipeline's busiest rank sends per step; 0 for one rank."""
    place = placement_of(layout)
    sends = [0] * layout.mesh.pp
    for stage, rank in enumerate(place):
        others = (stage - 1, stage + 1) if job.backward else (stage + 1,)
        sends[rank] += sum(place[other] != rank for other in others if 0 <= other < len(place))
    return max(sends) * layout.derived.accumulation


def _sent_weights_bytes(job: Workload, layout: Layout, gradient_bytes: int) -> int:
    elements = stage_elements(job, layout)
    weights, gradients = ([size * width for size in elements] for width in (job.compute_bytes, gradient_bytes))
    rounds = layout.derived.accumulation // layout.mesh.pp
    sent = volume(_rounds(layout, min(rounds, _ROUNDS)), weights, gradients)
    if rounds > _ROUNDS:
        # Each further round sends the same number of bytes.
        less = volume(_rounds(layout, _ROUNDS - 1), weights, gradients)
        sent = tuple(more + (rounds - _ROUNDS) * (more - one) for more, one in zip(sent, less, strict=True))
    return round(max(sent))


def boundary_bytes(job: Workload, layout: Layout) -> int:
    """Return the bytes that one stage sends to the next, for one micro-batch."""
    return int(boundary_elements(job, encode(layout))) * job.compute_bytes


def boundary_elements(job: Workload, layouts: Layouts) -> Column:
    """Return a column of how many elements one stage sends to the next: a rank's share of the residual stream."""
    length, stack = sequence_shares.tokens(job, layouts), job.stack
    if stack.sequence_parallel is not None:
        return layouts.micro_batch * length * job.model.hidden // tensor_shares.stream(job, layouts)
    # All shares of the sequence have the same size: the last one is padded.
    rows = tensor_shares.width(length, np.where(np.asarray(layouts.sequence_norms) == 1, layouts.tp, 1))
    return layouts.micro_batch * rows * tensor_shares.width(job.model.hidden, layouts.tensor_inner)


def ring_by_ranks(job: Workload, layout: Layout) -> list[WeightRing]:
    """Return how many copies of weights and gradients each pipeline rank holds where ranks pass weights on."""
    schedule = _rounds(layout, min(layout.derived.accumulation // layout.mesh.pp, _ROUNDS))
    rooms = [room(schedule, rank) for rank in range(schedule.ranks)]
    places = layer_places(job.model)
    kept = [places[start:stop] for start, stop in layout.pipeline.bounds]
    longest = places if NAMES.index(layout.pipeline.schedule) in HALVED_RING else max(kept, key=len)
    rebuilt = tuple(longest.count(kind) for kind in range(1 + len(job.model.expert_shapes)))
    largest = max(stage_elements(job, layout))
    return [
        WeightRing(
            passes_weights=True,
            inputs=activations,
            rebuilt=rebuilt,
            weights=one.weights,
            gradients=one.gradients,
            elements=largest,
        )
        for one, activations in zip(rooms, activations_by_ranks(layout), strict=True)
    ]


def _rounds(layout: Layout, rounds: int) -> Schedule:
    """Return the schedule of ``rounds`` rounds of micro-batches; a round has one micro-batch per rank."""
    return schedule_of(layout.changed({"derived.accumulation": rounds * layout.mesh.pp, "derived.schedule_hash": ""}))


_ROUNDS = 4
"""Rounds of micro-batches after which the number of weights in transfer no longer grows."""

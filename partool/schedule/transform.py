"""Derive a schedule of only forward passes, one without frozen backward passes, or the rest after stages moved.

If weights are sent around a ring, schedules of the first two kinds are newly generated, and cutting a schedule raises
``ValueError``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from partool.schedule.actions import COMPUTE, Action, Order, Schedule, with_transfers
from partool.schedule.weipipe import VARIANTS, weipipe


class Frontier(NamedTuple):
    """Tensors that an interrupted schedule needs later: made by completed actions and needed by remaining actions."""

    messages: tuple[Action, ...]
    """Activations and gradients made but not used yet, under their receiver's name (``RECV_F`` or ``RECV_B`` of the
    stage that uses them), wherever they are: on the sending rank, in transfer, received, or made and used on one
    rank."""
    live_passes: tuple[tuple[int, int], ...]
    """(Stage, micro-batch) of each forward pass that is done and whose last backward action is not done."""


def forward_only(schedule: Schedule, micro_batches: int = 0) -> Schedule:
    """Return a schedule for evaluation, with only the forward passes of ``micro_batches`` micro-batches.

    If ``micro_batches`` is 0, the number of micro-batches of ``schedule`` is used. A rank takes the deepest stage whose
    input has arrived, so that few outputs wait. ``trained_from`` of the result is the number of stages.
    """
    count = micro_batches or schedule.micro_batches
    if schedule.moves == "weights":
        return _round(schedule, count, schedule.stages)
    order = _forward_order(schedule.placement, schedule.ranks, count)
    return replace(
        schedule,
        micro_batches=count,
        lists=with_transfers(order, schedule.placement),
        trained_from=schedule.stages,
    )


def without_backward(schedule: Schedule, trained_from: int) -> Schedule:
    """Return a schedule without backward passes and gradient transfers of the stages before ``trained_from``.

    The other actions keep their order. ``trained_from`` counts stages; if all are frozen, only forward passes are left.
    """
    if not 0 <= trained_from <= schedule.stages:
        raise ValueError(f"there is no stage {trained_from} of {schedule.stages} to train from")
    if schedule.moves == "weights":
        return _round(schedule, schedule.micro_batches, max(trained_from, schedule.trained_from))
    # The first trained stage sends no gradient: no stage would receive it.
    lowest = {"B": 0, "I": 0, "W": 0, "RECV_B": 0, "SEND_B": 1}
    lists = tuple(
        tuple(action for action in actions if action.stage >= trained_from + lowest.get(action.kind, -trained_from))
        for actions in schedule.lists
    )
    return replace(schedule, lists=lists, trained_from=max(trained_from, schedule.trained_from))


def after(schedule: Schedule, steps: int) -> tuple[int, ...]:
    """Return for each rank the number of its actions among the first ``steps`` actions of all ranks together.

    All ranks can reach this point: no action before it needs an action after it.
    """
    counts = [0] * schedule.ranks
    for rank, _ in _in_time(schedule.lists, schedule.placement, steps):
        counts[rank] += 1
    return tuple(counts)


def cut(schedule: Schedule, executed: Sequence[int]) -> Frontier:
    """Return the tensors in flight after ``executed`` actions of each rank; ``ValueError`` if this state is impossible.

    The schedule may be the result of :func:`remap`.
    """
    _staying(schedule)
    split = [(actions[:count], actions[count:]) for actions, count in zip(schedule.lists, executed, strict=True)]
    _reachable({action for before, _ in split for action in before})
    behind = {action for _, rest in split for action in rest}
    forward = {(stage, batch) for kind, stage, batch in behind if kind == "F"}
    backward = {(stage, batch) for kind, stage, batch in behind if kind in ("B", "I")}
    # Actions that are not ahead were executed, in this schedule or before an earlier cut.
    messages = [
        Action("RECV_F", stage, batch) for stage, batch in forward if stage and (stage - 1, batch) not in forward
    ]
    messages += [
        Action("RECV_B", stage, batch)
        for stage, batch in backward
        if stage + 1 < schedule.stages and (stage + 1, batch) not in backward
    ]
    halves = backward | {(stage, batch) for kind, stage, batch in behind if kind == "W"}
    return Frontier(tuple(sorted(messages)), tuple(sorted(halves - forward)))


def remap(schedule: Schedule, executed: Sequence[int], placement: Sequence[int]) -> Schedule:
    """Return the actions that remain after ``executed`` actions of each rank, with stages moved to ``placement``.

    Before the first action, the caller must transfer the tensors that :func:`cut` names: messages to the new rank of
    their stage, and tensors held for backward passes. The returned lists transfer only tensors made later. Each new
    rank executes in the order in which the old lists would have run if every action took one unit of time, so the lists
    finish. Raises ``ValueError`` if the ranks cannot have reached that point, or if ``placement`` names other stages or
    ranks.
    """
    _staying(schedule)
    if len(placement) != schedule.stages or not set(placement) <= set(range(schedule.ranks)):
        raise ValueError(f"{list(placement)} is no map of {schedule.stages} stages to {schedule.ranks} ranks")
    cut(schedule, executed)
    rest = tuple(
        tuple(action for action in actions[count:] if action.kind in COMPUTE)
        for actions, count in zip(schedule.lists, executed, strict=True)
    )
    order: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for _, action in _in_time(rest, schedule.placement):
        order[placement[action.stage]].append(action)
    where = tuple(placement)
    return replace(
        schedule,
        chunks=max(where.count(rank) for rank in where),
        placement=where,
        lists=with_transfers(tuple(map(tuple, order)), where),
    )


def _round(schedule: Schedule, micro_batches: int, trained_from: int) -> Schedule:
    """Return a newly generated schedule that sends weights around a ring, with shifts for its compute actions."""
    if schedule.name not in VARIANTS:
        raise ValueError(f"{schedule.name} is none of {', '.join(VARIANTS)}: what a part of it moves is not known")
    return weipipe(schedule.name, schedule.ranks, micro_batches, schedule.chunks, trained_from)


def _staying(schedule: Schedule) -> None:
    if schedule.moves != "activations":
        raise ValueError(f"{schedule.name} passes weights round: there is no place to cut it")


def _forward_order(placement: Sequence[int], ranks: int, micro_batches: int) -> Order:
    """Return each rank's forward passes in order; in every unit of time, a rank takes the deepest available pass."""
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # Per rank: (-stage, micro-batch), a heap.
    waiting[placement[0]] = [(0, batch) for batch in range(micro_batches)]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while any(waiting):
        ready = [(rank, heapq.heappop(heap)) for rank, heap in enumerate(waiting) if heap]
        for rank, (deep, batch) in ready:
            lists[rank].append(Action("F", -deep, batch))
            if 1 - deep < len(placement):
                heapq.heappush(waiting[placement[1 - deep]], (deep - 1, batch))
    return tuple(map(tuple, lists))


def _reachable(before: set[Action]) -> None:
    for action in before:
        kind, stage, batch = action
        if kind in COMPUTE or kind.startswith("SEND"):
            continue
        made = (Action("SEND_F", stage - 1, batch),) if kind == "RECV_F" else (Action("SEND_B", stage + 1, batch),)
        if not before.issuperset(made):
            raise ValueError(f"{tuple(action)} cannot be done before {tuple(made[0])}")


def _in_time(lists: Order, placement: Sequence[int], steps: int | None = None) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in the order of start times if compute actions take one unit of time and transfers take 0.

    Inputs that no action in the lists makes exist from the beginning.
    """
    made = {action for actions in lists for action in actions}
    stop: dict[Action, int] = {}
    at = [0] * len(lists)
    free = [0] * len(lists)
    remaining = sum(map(len, lists)) if steps is None else min(steps, sum(map(len, lists)))
    while remaining:
        best: tuple[int, int] | None = None
        for rank, actions in enumerate(lists):
            if at[rank] == len(actions):
                continue
            needs = [need for need in _needed(actions[at[rank]], placement) if need in made]
            if all(need in stop for need in needs):
                start = max([free[rank], *(stop[need] for need in needs)])
                best = min(best, (start, rank)) if best else (start, rank)
        if best is None:
            raise ValueError("the lists cannot go on: their ranks wait for each other")
        start, rank = best
        action = lists[rank][at[rank]]
        stop[action] = free[rank] = start + (action.kind in COMPUTE)
        at[rank] += 1
        remaining -= 1
        yield rank, action


def _needed(action: Action, placement: Sequence[int]) -> list[Action]:
    """Return the actions of other ranks, or of other stages on the same rank, that make an action's inputs."""
    kind, stage, batch = action
    if kind == "RECV_F":
        return [Action("SEND_F", stage - 1, batch)]
    if kind == "RECV_B":
        return [Action("SEND_B", stage + 1, batch)]
    if kind == "F" and stage:
        return [Action("F", stage - 1, batch)]
    if kind in ("B", "I") and stage + 1 < len(placement):
        return [Action("B", stage + 1, batch), Action("I", stage + 1, batch)]
    return []

"""A rank's list of actions prepared to run: the peer of each action, and the message that it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from partool.schedule import COMPUTE, Action, Schedule, cut, peer

Halved = Set[tuple[int, int]]
"""Set of (stage, micro-batch) of backward passes that come in two halves."""


class Arrival(NamedTuple):
    """A message from another rank: its sender, and its index among that sender's messages, from 0."""

    sender: int
    place: int


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One action of this rank."""

    action: Action
    stage: int
    batch: int
    first: bool
    """Whether this is the first stage, whose input is tokens."""
    last: bool
    """Whether the stage yields the loss."""
    passes_back: bool
    """Whether the stage before this one is trained too, and waits for a gradient."""
    trained: bool
    split: bool
    """Whether the backward pass of this stage and micro-batch comes in two halves."""
    neighbour: int
    """Rank of the stage that a compute action's result goes to, or of the other end of a transfer; -1: none."""
    arrival: Arrival | None
    """The message of a receive, or the one that a compute action waits for; None if its input is local."""


@dataclass(frozen=True, slots=True)
class Program:
    """Everything about a rank's list that is the same in each step."""

    steps: tuple[ProgramStep, ...]
    inbound: dict[int, tuple[Action, ...]]
    """Receives by sender, in the order of sending."""
    unclaimed: tuple[tuple[Action, Arrival], ...]
    """Receives whose messages no action of this list uses; a later part of the list does."""


def halved(schedule: Schedule) -> Halved:
    """Return the backward passes that come in two halves."""
    return {(stage, batch) for actions in schedule.lists for kind, stage, batch in actions if kind in ("I", "W")}


def compile_program(schedule: Schedule, rank: int, split: Halved) -> Program:
    """Return a rank's program. The k-th receive from a rank takes the k-th message that this rank sends."""
    inbound: defaultdict[int, list[Action]] = defaultdict(list)
    arrivals: dict[Action, Arrival] = {}
    for action in schedule.lists[rank]:
        if action.kind.startswith("RECV"):
            sender, _ = peer(schedule, rank, action)
            arrivals[action] = Arrival(sender, len(inbound[sender]))
            inbound[sender].append(action)
    steps = tuple(_step(schedule, rank, action, arrivals, split) for action in schedule.lists[rank])
    claimed = {step.arrival for step in steps if step.action.kind in COMPUTE}
    return Program(
        steps=steps,
        inbound={sender: tuple(messages) for sender, messages in inbound.items()},
        unclaimed=tuple((action, arrival) for action, arrival in arrivals.items() if arrival not in claimed),
    )


def _step(schedule: Schedule, rank: int, action: Action, arrivals: dict[Action, Arrival], split: Halved) -> ProgramStep:
    kind, stage, batch = action
    if kind in COMPUTE:
        needs = Action("RECV_F" if kind == "F" else "RECV_B", stage, batch)
        arrival = None if kind == "W" else arrivals.get(needs)
        after = stage + 1 if kind == "F" else stage - 1
        neighbour = schedule.placement[after] if 0 <= after < schedule.stages else -1
    else:
        arrival = arrivals.get(action)
        neighbour, _ = peer(schedule, rank, action)
    return ProgramStep(
        action,
        stage,
        batch,
        first=stage == 0,
        last=stage == schedule.stages - 1,
        passes_back=stage > schedule.trained_from,
        trained=stage >= schedule.trained_from,
        split=(stage, batch) in split,
        neighbour=neighbour,
        arrival=arrival,
    )


def until(schedule: Schedule, done: Sequence[int]) -> Schedule:
    """Return the first ``done[rank]`` actions of each list, and then transfers of all results not yet used.

    So no message is in flight or still unsent when the ranks stop there. Raises ``ValueError`` for numbers that the
    ranks cannot reach.
    """
    under_way = cut(schedule, done).messages
    first = [list(actions[:count]) for actions, count in zip(schedule.lists, done, strict=True)]
    for maker, actions in enumerate(schedule.lists):
        for send in actions:
            if not send.kind.startswith("SEND"):
                continue
            rank, receive = peer(schedule, maker, send)
            if receive in under_way:
                first[maker] += [] if send in actions[: done[maker]] else [send]
                first[rank] += [] if receive in schedule.lists[rank][: done[rank]] else [receive]
    return replace(schedule, lists=tuple(map(tuple, first)))

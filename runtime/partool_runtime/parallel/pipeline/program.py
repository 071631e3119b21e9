"""Prepares a rank's list of actions: finds the peer of each action, and the message that the action waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from partool.schedule import COMPUTE, Action, Schedule, cut, peer, posts

Halved = Set[tuple[int, int]]
"""(stage, micro-batch) pairs whose backward pass is split: input gradients first, weight gradients later."""


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
    """Whether the action's stage is the first stage, whose input is tokens."""
    last: bool
    """Whether the action's stage is the last stage, which yields the loss."""
    passes_back: bool
    """Whether the previous stage is also trained and needs a gradient from this stage."""
    trained: bool
    split: bool
    """Whether this backward pass is split: input gradients first, weight gradients later."""
    neighbour: int
    """For a compute action, the rank where the pass continues, or -1 if it ends here; for a transfer, the peer."""
    arrival: Arrival | None
    """Message that a compute action waits for; None for actions without a message."""
    posts: tuple[Arrival, ...] = ()
    """Messages whose receives are posted before the action (:mod:`partool.schedule.posting`)."""


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's prepared action list, the same in each step."""

    steps: tuple[ProgramStep, ...]
    inbound: dict[int, tuple[Action, ...]]
    """Receive actions by sender, in the order in which the sender sends the messages."""
    unclaimed: tuple[tuple[Action, Arrival], ...]
    """Receive actions, each with its message, that only a later part of the schedule uses."""
    last_posts: tuple[Arrival, ...]
    """Messages whose receives are posted after all actions."""


def halved(schedule: Schedule) -> Halved:
    """Return the (stage, micro-batch) pairs whose backward pass is split into input and weight gradients."""
    return {(stage, batch) for actions in schedule.lists for kind, stage, batch in actions if kind in ("I", "W")}


def compile_program(schedule: Schedule, rank: int, split: Halved, executed: Set[Action] = frozenset()) -> Program:
    """Return a rank's program. The k-th receive from a sender takes the sender's k-th message.

    ``executed`` are the compute actions that ran before the program begins.
    """
    inbound: defaultdict[int, list[Action]] = defaultdict(list)
    arrivals: dict[Action, Arrival] = {}
    for action in schedule.lists[rank]:
        if action.kind.startswith("RECV"):
            sender, _ = peer(schedule, rank, action)
            arrivals[action] = Arrival(sender, len(inbound[sender]))
            inbound[sender].append(action)
    posted = {
        at: tuple(arrivals[action] for action in receives) for at, receives in posts(schedule, executed)[rank].items()
    }
    steps = tuple(
        replace(_step(schedule, rank, action, arrivals, split), posts=posted.get(at, ()))
        for at, action in enumerate(schedule.lists[rank])
    )
    claimed = {step.arrival for step in steps if step.action.kind in COMPUTE}
    return Program(
        steps=steps,
        last_posts=posted.get(len(steps), ()),
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
        arrival = None
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


def until(schedule: Schedule, action_counts: Sequence[int]) -> Schedule:
    """Return the first ``action_counts[rank]`` actions of each rank's list, and the missing transfers of their results.

    So every message that one list sends is received by another list. Raises ``ValueError`` if a rank cannot reach
    ``action_counts[rank]`` actions.
    """
    under_way = cut(schedule, action_counts).messages
    first = [list(actions[:count]) for actions, count in zip(schedule.lists, action_counts, strict=True)]
    for maker, actions in enumerate(schedule.lists):
        for send in actions:
            if not send.kind.startswith("SEND"):
                continue
            rank, receive = peer(schedule, maker, send)
            if receive in under_way:
                first[maker] += [] if send in actions[: action_counts[maker]] else [send]
                first[rank] += [] if receive in schedule.lists[rank][: action_counts[rank]] else [receive]
    return replace(schedule, lists=tuple(map(tuple, first)))

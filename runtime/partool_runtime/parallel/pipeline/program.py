"""A rank's list of actions made ready to run: who the peers are, and which message each action waits for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from partool.schedule import COMPUTE, Action, Schedule, peer


class Arrival(NamedTuple):
    """A message from another rank: who sends it, and its place among that sender's messages, from 0."""

    sender: int
    place: int


@dataclass(frozen=True, slots=True)
class Step:
    """One action of this rank."""

    action: Action
    stage: int
    batch: int
    first: bool
    """Whether the stage's input is no activation: the first stage."""
    last: bool
    """Whether the stage yields the loss."""
    wants_input_gradient: bool
    """Whether the stage before this one is trained too, and waits for a gradient."""
    trained: bool
    split: bool
    """Whether the backward pass of this stage and micro-batch comes in two halves."""
    peer: int = -1
    """Of a transfer: the other rank."""
    arrival: Arrival | None = None
    """Of a receive: which message it is. Of compute: the message that it waits for; None if none comes by wire."""


@dataclass(frozen=True, slots=True)
class Program:
    """Everything about a rank's list that is the same in each step."""

    steps: tuple[Step, ...]
    inbound: dict[int, tuple[Action, ...]]
    """Receives by sender, in the order of the wire."""
    forward_only: bool


def compile_program(schedule: Schedule, rank: int) -> Program:
    """Return a rank's program. The k-th receive from a rank takes the k-th message that this rank sends."""
    actions = schedule.lists[rank]
    inbound: defaultdict[int, list[Action]] = defaultdict(list)
    where: dict[Action, Arrival] = {}
    for action in actions:
        if action.kind.startswith("RECV"):
            sender, _ = peer(schedule, rank, action)
            where[action] = Arrival(sender, len(inbound[sender]))
            inbound[sender].append(action)
    halved = {(action.stage, action.micro_batch) for action in actions if action.kind in ("I", "W")}
    return Program(
        steps=tuple(_step(schedule, rank, action, where, halved) for action in actions),
        inbound={sender: tuple(messages) for sender, messages in inbound.items()},
        forward_only=schedule.trained_from >= schedule.stages,
    )


def _step(
    schedule: Schedule, rank: int, action: Action, where: dict[Action, Arrival], halved: set[tuple[int, int]]
) -> Step:
    kind, stage, batch = action
    if kind in COMPUTE:
        needs = Action("RECV_F" if kind == "F" else "RECV_B", stage, batch)
        arrival = None if kind == "W" else where.get(needs)
    else:
        arrival = where.get(action)
    return Step(
        action,
        stage,
        batch,
        first=stage == 0,
        last=stage == schedule.stages - 1,
        wants_input_gradient=stage > schedule.trained_from,
        trained=stage >= schedule.trained_from,
        split=(stage, batch) in halved,
        peer=-1 if kind in COMPUTE else peer(schedule, rank, action)[0],
        arrival=arrival,
    )

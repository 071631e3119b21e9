"""Turn action lists into steps; a step starts when all steps that it waits for have stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from partool.schedule.actions import COMPUTE, SHIFTS, Action, Kind, Schedule, peer


class Needs:
    """Finds the actions that compute or receive the inputs of a compute action of a schedule.

    ``before`` are compute actions executed before the action lists begin.
    """

    def __init__(self, schedule: Schedule, before: Set[Action] = frozenset()) -> None:
        self._stages = schedule.stages
        # If weights are sent, a micro-batch stays on its rank: no input of a stage comes from another rank.
        self._placement = schedule.placement if schedule.moves == "activations" else (0,) * schedule.stages
        self._halved = {
            (stage, batch) for actions in (before, *schedule.lists) for kind, stage, batch in actions if kind == "I"
        }

    def of(self, action: Action) -> list[Action]:
        """Return the actions that a compute action waits for: compute actions of its own rank, or receives."""
        kind, stage, batch = action
        if kind == "W":
            return [Action("I", stage, batch)]
        if kind == "F":
            return [self._beside(action, stage - 1)] if stage else []
        forward = Action("F", stage, batch)
        return [forward, self._beside(action, stage + 1)] if stage < self._stages - 1 else [forward]

    def _beside(self, action: Action, neighbour: int) -> Action:
        kind, stage, batch = action
        if self._placement[neighbour] != self._placement[stage]:
            return Action("RECV_F" if kind == "F" else "RECV_B", stage, batch)
        return Action("F" if kind == "F" else self.backward(neighbour, batch), neighbour, batch)

    def backward(self, stage: int, batch: int) -> Kind:
        """Return the kind of the backward action that makes the gradients of a stage's inputs."""
        return "I" if (stage, batch) in self._halved else "B"


Pair = tuple[int, int]
"""Sending and receiving rank."""
Step = tuple[int, int, int, int]
"""Four numbers: column of the step's duration; distance back to the previous step of the rank; distance back to the
step of another rank that makes the input; column of the transfer time of this input. Distances count steps; 0 means
that there is no such step."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""Kinds of compute actions, in the order of their columns in the durations."""
Link = tuple[int, int, bool]
"""Sending and receiving rank, and whether the link carries gradients that are sent around a ring with weights."""


class Steps(NamedTuple):
    """Actions of a schedule, sorted so that each action follows its inputs.

    The columns of the durations are: the forward, backward, input-gradient and weight-gradient times of the stages, the
    transfer times of the links, and zero.
    """

    steps: tuple[Step, ...]
    links: tuple[Link, ...]
    of: tuple[tuple[int, Action] | None, ...]
    """Rank and action of each step; None for a step that only joins two waits."""
    sends: tuple[tuple[int, Action, int, int], ...]
    """For each transfer that is not a step: rank, action, index of the step before it, column of the transfer time."""


@lru_cache(maxsize=64)
def steps_of(schedule: Schedule, blocking: bool = False, shared: bool = False) -> Steps:
    """Return the steps of a schedule; raises ``ValueError`` where actions wait for each other in a cycle.

    With ``blocking`` a rank does nothing while it sends and waits at each receive. With ``shared`` the messages of an
    ordered pair of ranks go one after the other, in the order of the sender's list. Schedules that send
    weights around a ring always share links: a turn's three messages are large and in flight together. (Serving them as
    they become ready instead changed WeiPipe's makespan by 2 % at most while transfers take less time than passes.)
    """
    walk = _Walk(schedule, blocking, shared or schedule.moves == "weights")
    at, moved = [0] * schedule.ranks, True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions) and walk.take(rank, actions[at[rank]]):
                at[rank] += 1
                moved = True
    stuck = [(rank, schedule.lists[rank][place]) for rank, place in enumerate(at) if place < len(schedule.lists[rank])]
    if stuck:
        waiting = ", ".join(f"rank {rank}: {tuple(action)}" for rank, action in stuck)
        raise ValueError(f"the schedule cannot go on; waiting: {waiting}")
    return Steps(tuple(walk.steps), walk.links, tuple(walk.of), tuple(walk.sends))


class _Walk:
    """Progress of a walk through the lists; steps are identified by their index."""

    def __init__(self, schedule: Schedule, blocking: bool, shared: bool) -> None:
        self.schedule, self.blocking, self.shared, self.needs = schedule, blocking, shared, Needs(schedule)
        self.links = links_of(schedule)
        first = 4 * schedule.stages
        self.column = {link: first + at for at, link in enumerate(self.links)}
        self.zero = first + len(self.links)
        self.steps: list[Step] = []
        self.of: list[tuple[int, Action] | None] = []
        self.sends: list[tuple[int, Action, int, int]] = []
        self.last = [-1] * schedule.ranks
        self.wire: dict[Pair, int] = {}
        """(Sending rank, receiving rank) of a shared link → index of the last message's step."""
        self.made: set[Action] = set()
        self.arrives: dict[tuple[int, Action], tuple[int, int]] = {}
        """(Rank, receive action) → (index of the step after which the message leaves, column of its transfer time)."""
        self.carried: dict[tuple[int, bool, int], tuple[int, Action]] = {}
        """(Rank, True for gradients or False for weights, stage) → the last receive that brought such tensors."""

    def take(self, rank: int, action: Action) -> bool:
        """Execute an action of a rank; return False if an input is missing."""
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        return self._send(rank, action) if action.kind.startswith("SEND") else self._receive(rank, action)

    def _compute(self, rank: int, action: Action) -> bool:
        waits = []
        for need in self.needs.of(action):
            if need.kind in COMPUTE:
                if need not in self.made:
                    return False
            else:
                waits.append((rank, need))
        # The weight gradients of a split backward pass need no weights.
        if action.kind != "W" and (brought := self.carried.get((rank, False, action.stage))):
            waits.append(brought)
        if any(wait not in self.arrives for wait in waits):
            return False
        column = KINDS.index(action.kind) * self.schedule.stages + action.stage
        self.last[rank] = self._add(column, self.last[rank], [self.arrives[wait] for wait in waits], (rank, action))
        self.made.add(action)
        return True

    def _send(self, rank: int, action: Action) -> bool:
        receiver, other = peer(self.schedule, rank, action)
        pair = rank, receiver
        waits = []
        if action.kind in SHIFTS and (brought := self.carried.get((rank, action.kind == "SEND_G", action.stage))):
            if brought not in self.arrives:
                return False
            waits.append(self.arrives[brought])
        column, before = self.column[(*pair, action.kind == "SEND_G")], self.last[rank]
        if not (self.blocking or self.shared) and before >= 0:
            self.arrives[receiver, other] = before, column
            self.sends.append((rank, action, before, column))
            return True
        if self.shared and pair in self.wire:
            waits.append((self.wire[pair], self.zero))
        self.wire[pair] = self._add(column, before, waits, (rank, action))
        self.arrives[receiver, other] = self.wire[pair], self.zero
        if self.blocking:
            self.last[rank] = self.wire[pair]
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        if self.blocking:
            if (rank, action) not in self.arrives:
                return False
            self.last[rank] = self._add(self.zero, self.last[rank], [self.arrives[rank, action]], None)
        if action.kind in SHIFTS:
            self.carried[rank, action.kind == "RECV_G", action.stage] = rank, action
        return True

    def _add(self, column: int, before: int, waits: list[tuple[int, int]], of: tuple[int, Action] | None) -> int:
        """Append a step and return its index. A step waits for one input; each further input adds an empty step."""
        for other, under_way in waits[:-1]:
            before = self._append(self.zero, before, other, under_way, None)
        other, under_way = waits[-1] if waits else (-1, self.zero)
        return self._append(column, before, other, under_way, of)

    def _append(self, column: int, before: int, other: int, under_way: int, of: tuple[int, Action] | None) -> int:
        here = len(self.steps)
        self.steps.append((column, here - before if before >= 0 else 0, here - other if other >= 0 else 0, under_way))
        self.of.append(of)
        return here


def wire(schedule: Schedule, rank: int, action: Action) -> Link:
    """Return the link of a transfer; the messages of each link keep their order."""
    peer_rank, _ = peer(schedule, rank, action)
    sends = action.kind.startswith("SEND")
    return rank if sends else peer_rank, peer_rank if sends else rank, action.kind.endswith("_G")


def links_of(schedule: Schedule) -> tuple[Link, ...]:
    """Return the links between ranks on which a schedule sends messages."""
    links = {
        wire(schedule, rank, action)
        for rank, actions in enumerate(schedule.lists)
        for action in actions
        if action.kind.startswith("SEND")
    }
    return tuple(sorted(links))


def link_times(send_s: Any, gradient_s: Any, links: Sequence[Link]) -> list[Any]:
    """Return the transfer time of each link; raises ``ValueError`` if a link has no time.

    ``send_s`` is one time for all links, or times by pair of ranks. ``gradient_s`` has this form too, for gradients
    sent around a ring; None means the times in ``send_s``.
    """
    times_s = []
    for here, receiver, gradients in links:
        times = gradient_s if gradients and gradient_s is not None else send_s
        if isinstance(times, Mapping) and (here, receiver) not in times:
            raise ValueError(f"there is no transfer time from rank {here} to rank {receiver}")
        times_s.append(times[here, receiver] if isinstance(times, Mapping) else times)
    return times_s

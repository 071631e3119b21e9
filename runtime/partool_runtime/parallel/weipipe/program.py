"""One rank's list of actions, grouped into the executor's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from partool.schedule import COMPUTE, Action, Schedule, peer

_WEIGHTS = frozenset({"SEND_FW", "RECV_FW", "SEND_BW", "RECV_BW"})


@dataclass(frozen=True, slots=True)
class ShiftGroup:
    """Consecutive shifts (sends and receives) of weights in one turn, each with its peer rank.

    Receives and sends to rank 0 come first, then the sends that pass weights on, which wait for the receives.
    """

    shifts: tuple[tuple[Action, int], ...]
    releases: frozenset[int]
    """Stages whose received weights are released after these shifts, as no later action reads these weights."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A compute action."""

    action: Action
    releases: bool
    """Whether to release the stage's received weights after this action, as no later action reads these weights."""
    keeps: bool
    """Whether to keep the graph: this is a forward pass whose backward pass is the next compute action."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A shift (send or receive) of gradients, with its peer rank."""

    action: Action
    peer: int


Step = ShiftGroup | Compute | Shift


def compile_program(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """Return a rank's steps. Raises ``ValueError`` for a schedule that sends activations."""
    if schedule.moves != "weights":
        raise ValueError(f"{schedule.name} does not let weights travel")
    actions = schedule.lists[rank]
    last = _last_readers(schedule, rank)
    kept = _kept(actions)
    steps: list[Step] = []
    run: list[int] = []
    for at, action in enumerate(actions):
        if run and (action.kind not in _WEIGHTS or _opens(schedule, rank, action, [actions[one] for one in run])):
            steps.append(_move(schedule, rank, run, last))
            run = []
        if action.kind in _WEIGHTS:
            run.append(at)
        elif action.kind in COMPUTE:
            steps.append(Compute(action, at in last, at in kept))
        else:
            steps.append(Shift(action, peer(schedule, rank, action)[0]))
    return (*steps, _move(schedule, rank, run, last)) if run else tuple(steps)


def _opens(schedule: Schedule, rank: int, action: Action, run: Sequence[Action]) -> bool:
    """Return whether a shift of weights begins a new group, given the shifts of the group so far."""
    if _passes_on(schedule, rank, action):
        return False
    # A group passes weights on last. A receive or a send to rank 0 that was posted before what the list names first
    # could close a circle of ranks that wait for each other.
    if any(_passes_on(schedule, rank, one) for one in run):
        return True
    return action.kind.startswith("RECV") and any(
        one.kind.startswith("RECV") and one.micro_batch < action.micro_batch for one in run
    )


def _passes_on(schedule: Schedule, rank: int, action: Action) -> bool:
    return action.kind.startswith("SEND") and peer(schedule, rank, action)[0] != 0


def _move(schedule: Schedule, rank: int, run: list[int], last: frozenset[int]) -> ShiftGroup:
    actions = schedule.lists[rank]
    shifts = tuple((actions[at], peer(schedule, rank, actions[at])[0]) for at in run)
    return ShiftGroup(shifts, frozenset(actions[at].stage for at in run if at in last))


def _last_readers(schedule: Schedule, rank: int) -> frozenset[int]:
    """Return the indices of the actions that use a received copy of weights last (the RECV of an unused copy)."""
    last: dict[int, int] = {}
    ends = set()
    for at, (kind, stage, _) in enumerate(schedule.lists[rank]):
        if schedule.placement[stage] == rank or kind in ("W", "RECV_G", "SEND_G"):
            continue
        if kind.startswith("RECV") and stage in last:
            ends.add(last[stage])
        last[stage] = at
    return frozenset(ends | set(last.values()))


def _kept(actions: tuple[Action, ...]) -> frozenset[int]:
    computed = [(at, action) for at, action in enumerate(actions) if action.kind in COMPUTE]
    return frozenset(
        at
        for (at, action), (_, after) in pairwise(computed)
        if action.kind == "F" and after.kind in ("B", "I") and after[1:] == action[1:]
    )

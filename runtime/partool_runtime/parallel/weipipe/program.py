"""One rank's list of actions, grouped into the executor's steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from partool.schedule import COMPUTE, Action, Schedule, peer

_WEIGHTS = frozenset({"SEND_FW", "RECV_FW", "SEND_BW", "RECV_BW"})


@dataclass(frozen=True, slots=True)
class ShiftGroup:
    """Consecutive shifts (sends and receives) of weights in one turn, each with its peer rank."""

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
        later = run and action.kind.startswith("RECV") and any(_comes_before(actions[one], action) for one in run)
        if action.kind in _WEIGHTS and not later:
            run.append(at)
            continue
        if run:
            steps.append(_move(schedule, rank, run, last))
            run = []
        if action.kind in _WEIGHTS:
            run.append(at)
        elif action.kind in COMPUTE:
            steps.append(Compute(action, at in last, at in kept))
        else:
            steps.append(Shift(action, peer(schedule, rank, action)[0]))
    return (*steps, _move(schedule, rank, run, last)) if run else tuple(steps)


def _comes_before(one: Action, other: Action) -> bool:
    return one.kind.startswith("RECV") and one.micro_batch < other.micro_batch


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

"""Schedules in time: when each action runs if its inputs come as early as they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partool.schedule.actions import COMPUTE, Action, Schedule


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage per micro-batch, and of one transfer between ranks."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Of whole backward passes; where a schedule halves them, of both halves together."""
    weight_s: Sequence[float] | None = None
    """Of the weights' half; None: half of the backward pass."""
    send_s: float = 0.0

    def of(self, action: Action) -> float:
        """Return the seconds of a compute action."""
        if action.kind == "F":
            return self.forward_s[action.stage]
        whole = self.backward_s[action.stage]
        weight = self.weight_s[action.stage] if self.weight_s is not None else 0.5 * whole
        return {"B": whole, "W": weight, "I": whole - weight}[action.kind]


@dataclass(frozen=True)
class Event:
    """One compute action in time."""

    rank: int
    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """All events of a schedule, in the order in which they start."""

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    """Per rank."""
    in_flight: tuple[int, ...]
    """Per rank: most micro-batches (of one stage each) whose activations exist at once."""

    @property
    def bubble(self) -> float:
        """Idle share of all ranks."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """Return when every action runs. Sends do not hold their rank up; an input arrives ``send_s`` after it was made.

    Raises ``ValueError`` where actions wait for each other in a circle.
    """
    done: dict[Action, float] = {}
    todo = [[action for action in rank if action.kind in COMPUTE] for rank in schedule.lists]
    at, free = [0] * schedule.ranks, [0.0] * schedule.ranks
    events: list[Event] = []
    left = sum(len(rank) for rank in todo)
    while left:
        before = left
        for rank, actions in enumerate(todo):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                ready = _ready_s(schedule, action, done, times.send_s)
                if ready is None:
                    break
                start = max(free[rank], ready)
                done[action] = free[rank] = start + times.of(action)
                events.append(Event(rank, action, start, free[rank]))
                at[rank] += 1
                left -= 1
        if left == before:
            waiting = ", ".join(f"rank {rank}: {todo[rank][i]}" for rank, i in enumerate(at) if i < len(todo[rank]))
            raise ValueError(f"the schedule cannot go on; waiting: {waiting}")
    busy = tuple(sum(times.of(action) for action in rank) for rank in todo)
    events.sort(key=lambda event: (event.start_s, event.rank))
    return Timeline(tuple(events), max(free), busy, tuple(_peak(rank) for rank in todo))


def inputs(action: Action, stages: int, halved: bool) -> list[tuple[Action, bool]]:
    """Return what an action needs, each with whether it comes from the neighbouring stage."""
    kind, stage, batch = action
    if kind == "F":
        return [(Action("F", stage - 1, batch), True)] if stage else []
    if kind == "W":
        return [(Action("I", stage, batch), False)]
    needs = [(Action("F", stage, batch), False)]
    if stage < stages - 1:
        needs.append((Action("I" if halved else "B", stage + 1, batch), True))
    return needs


def _ready_s(schedule: Schedule, action: Action, done: dict[Action, float], send_s: float) -> float | None:
    latest = 0.0
    for need, neighbour in inputs(action, schedule.stages, action.kind == "I"):
        when = done.get(need)
        if when is None:
            return None
        away = neighbour and schedule.placement[need.stage] != schedule.placement[action.stage]
        latest = max(latest, when + send_s if away else when)
    return latest


def _peak(actions: Sequence[Action]) -> int:
    """Return the most activations held at once: from a forward pass to the last action that reads them."""
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    held = peak = 0
    for action in actions:
        held += (action.kind == "F") - (action.kind == last)
        peak = max(peak, held)
    return peak

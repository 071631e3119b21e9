"""Schedules in time: when each action runs if its inputs come as early as they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partool.schedule.actions import COMPUTE, Action, Schedule
from partool.schedule.needs import Needs


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage per micro-batch, and of one transfer between ranks."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Of whole backward passes; where a schedule halves them, of both halves together."""
    weight_s: Sequence[float] | None = None
    """Of the weights' half; None: half of the backward pass."""
    send_s: float = 0.0
    input_s: Sequence[float] | None = None
    """Of the inputs' half; None: the backward pass without the weights' half."""

    def of(self, action: Action) -> float:
        """Return the seconds of a compute action."""
        if action.kind == "F":
            return self.forward_s[action.stage]
        whole = self.backward_s[action.stage]
        weight = self.weight_s[action.stage] if self.weight_s is not None else 0.5 * whole
        halved = whole - weight if self.input_s is None else self.input_s[action.stage]
        return {"B": whole, "W": weight, "I": halved}[action.kind]


@dataclass(frozen=True)
class Event:
    """One action in time. A transfer is that of the sender: from when it leaves to when it has arrived."""

    rank: int
    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """All events of a schedule, in the order in which they start."""

    events: tuple[Event, ...]
    """Compute actions."""
    transfers: tuple[Event, ...]
    """Sends."""
    makespan_s: float
    busy_s: tuple[float, ...]
    """Per rank: seconds of compute."""
    in_flight: tuple[int, ...]
    """Per rank: most micro-batches (of one stage each) whose activations exist at once: from the forward pass until
    nothing reads them, that is the backward pass or the weights' half of it."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Per rank: seconds without compute."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks."""
        return sum(self.idle_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 0.0


def simulate(schedule: Schedule, times: StageTimes, blocking: bool = False) -> Timeline:
    """Return when every action runs.

    A send leaves when its rank comes to it and has arrived ``send_s`` later; links are not shared. Sends do not hold
    their rank up and receives are posted ahead, so a compute action waits for its own input only. With ``blocking`` a
    rank works on nothing while it sends, and waits at each receive until the data are there. Raises ``ValueError``
    where actions wait for each other in a circle.
    """
    run = _Run(schedule, times, blocking)
    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while run.step(rank):
                moved = True
    left = [(rank, schedule.lists[rank][at]) for rank, at in enumerate(run.at) if at < len(schedule.lists[rank])]
    if left:
        waiting = ", ".join(f"rank {rank}: {tuple(action)}" for rank, action in left)
        raise ValueError(f"the schedule cannot go on; waiting: {waiting}")
    busy = tuple(sum(times.of(action) for action in rank if action.kind in COMPUTE) for rank in schedule.lists)
    ordered = sorted(run.events, key=lambda event: (event.start_s, event.rank))
    return Timeline(
        events=tuple(event for event in ordered if event.action.kind in COMPUTE),
        transfers=tuple(event for event in ordered if event.action.kind not in COMPUTE),
        makespan_s=max(run.free_s),
        busy_s=busy,
        in_flight=tuple(peak_held(rank) for rank in schedule.lists),
    )


class _Run:
    """The state of a simulation: how far each rank is, and when."""

    def __init__(self, schedule: Schedule, times: StageTimes, blocking: bool) -> None:
        self.schedule, self.times, self.blocking = schedule, times, blocking
        self.needs = Needs(schedule)
        self.at, self.free_s = [0] * schedule.ranks, [0.0] * schedule.ranks
        self.done_s: dict[Action, float] = {}
        """When compute is done, or data have arrived (under the receive's name)."""
        self.events: list[Event] = []

    def step(self, rank: int) -> bool:
        """Take the next action of a rank; return False if it cannot be taken yet."""
        actions = self.schedule.lists[rank]
        if self.at[rank] == len(actions):
            return False
        action = actions[self.at[rank]]
        if action.kind in COMPUTE:
            ready = self._compute(rank, action)
        elif action.kind.startswith("SEND"):
            ready = self._send(rank, action)
        else:
            ready = self._receive(rank, action)
        self.at[rank] += ready
        return ready

    def _compute(self, rank: int, action: Action) -> bool:
        start = self.free_s[rank]
        for need in self.needs.of(action):
            when = self.done_s.get(need)
            if when is None:
                return False
            start = max(start, when)
        self.done_s[action] = self.free_s[rank] = start + self.times.of(action)
        self.events.append(Event(rank, action, start, self.free_s[rank]))
        return True

    def _send(self, rank: int, action: Action) -> bool:
        kind, stage, batch = action
        start, stop = self.free_s[rank], self.free_s[rank] + self.times.send_s
        there = Action("RECV_F", stage + 1, batch) if kind == "SEND_F" else Action("RECV_B", stage - 1, batch)
        self.done_s[there] = stop
        self.events.append(Event(rank, action, start, stop))
        if self.blocking:
            self.free_s[rank] = stop
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        if self.blocking:
            if action not in self.done_s:
                return False
            self.free_s[rank] = max(self.free_s[rank], self.done_s[action])
        return True


def peak_held(actions: Sequence[Action]) -> int:
    """Return the most activations held at once: from a forward pass to the last action that reads them.

    Forward passes that no backward pass follows, as those of frozen stages and of evaluations, hold nothing.
    """
    halved = {(stage, batch) for kind, stage, batch in actions if kind == "W"}
    read = halved | {(stage, batch) for kind, stage, batch in actions if kind == "B"}
    held = peak = 0
    for kind, stage, batch in actions:
        if kind == "F":
            held += (stage, batch) in read
        elif kind == "W" or (kind == "B" and (stage, batch) not in halved):
            held -= 1
        peak = max(peak, held)
    return peak

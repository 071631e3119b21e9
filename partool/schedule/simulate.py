"""Simulate schedules: compute the time of each action if inputs arrive as early as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partool.schedule.actions import COMPUTE, Action, Schedule
from partool.schedule.steps import KINDS, Link, Pair, Step, link_times, steps_of


@dataclass(frozen=True)
class StageTimes:
    """Seconds that each stage takes per micro-batch, and that one transfer between two ranks takes."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Seconds of the backward pass of each stage; if a schedule splits the pass, seconds of both parts together."""
    weight_s: Sequence[float] | None = None
    """Seconds of the weight gradients of each stage in a split backward pass; None means half of the pass."""
    send_s: float | Mapping[Pair, float] = 0.0
    """Seconds of a transfer: one value for all transfers, or a value per ordered pair of ranks. If weights are sent
    around a ring, seconds of sending one stage's weights."""
    input_s: Sequence[float] | None = None
    """Seconds of the input gradients of each stage in a split backward pass; None means the pass minus ``weight_s``."""
    gradient_send_s: float | Mapping[Pair, float] | None = None
    """If weights are sent around a ring, seconds of sending one stage's gradients; None means the time of the
    weights."""
    shared_links: bool = False
    """True if the messages of an ordered pair of ranks wait for each other; weights sent around a ring always do."""

    def columns(self, links: Sequence[Link]) -> list[float]:
        """Return the seconds of each column of :class:`partool.schedule.steps.Steps`.

        Raises ``ValueError`` if a link has no time.
        """
        stages = range(len(self.forward_s))
        compute_s = [self.of(Action(kind, stage, 0)) for kind in KINDS for stage in stages]
        return [*compute_s, *link_times(self.send_s, self.gradient_send_s, links), 0.0]

    def of(self, action: Action) -> float:
        """Return the seconds of a compute action."""
        if action.kind == "F":
            return self.forward_s[action.stage]
        full_s = self.backward_s[action.stage]
        weight = self.weight_s[action.stage] if self.weight_s is not None else 0.5 * full_s
        halved = full_s - weight if self.input_s is None else self.input_s[action.stage]
        return {"B": full_s, "W": weight, "I": halved}[action.kind]


@dataclass(frozen=True)
class TimedAction:
    """One action with its start and stop. A transfer starts when the data leave and stops when they have arrived."""

    rank: int
    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """All events of a schedule, in the order in which they start."""

    events: tuple[TimedAction, ...]
    """Compute actions with their times."""
    transfers: tuple[TimedAction, ...]
    """Sends with their times."""
    makespan_s: float
    busy_s: tuple[float, ...]
    """Seconds of compute, by rank."""
    in_flight: tuple[int, ...]
    """Maximum number of micro-batches (of one stage each) whose activations exist at once, by rank: from the forward
    pass until nothing reads them, which is after the backward pass, or after its weight gradients if it is split."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Return for each rank the number of seconds in which the rank does not compute."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Return the share of the ranks' total time in which ranks do not compute, from 0 to 1."""
        return idle_share(self.busy_s, self.makespan_s)


def idle_share(busy_s: Sequence[float], span_s: float) -> float:
    """Return the share of the ranks' total time in which they do not compute, from 0 to 1.

    ``busy_s`` are the seconds of compute of each rank, ``span_s`` the seconds from the first action to the last. Plans,
    timelines, pages and reports of runs all print this share.
    """
    return max(0.0, 1.0 - sum(busy_s) / (len(busy_s) * span_s)) if span_s else 0.0


def simulate(schedule: Schedule, times: StageTimes, blocking: bool = False) -> Timeline:
    """Return the start and stop times of every action, computed from ``times``.

    A send leaves when its rank reaches it and arrives ``send_s`` later. Sends do not block their rank and receives are
    posted ahead, so a compute action waits only for its own input: the result of the neighbouring stage, or, if weights
    are sent around a ring, its stage's weights. With ``blocking`` a rank computes nothing while it sends, and waits at
    each receive until the data have arrived. Raises ``ValueError`` where actions wait for each other in a cycle.
    """
    steps = steps_of(schedule, blocking, times.shared_links)
    durations = times.columns(steps.links)
    start, stop = _walk(steps.steps, durations)
    events = [
        TimedAction(*who, start_s, stop_s)
        for who, start_s, stop_s in zip(steps.of, start, stop, strict=True)
        if who is not None
    ]
    for rank, action, after, column in steps.sends:
        events.append(TimedAction(rank, action, stop[after], stop[after] + durations[column]))
    ordered = sorted(events, key=lambda event: (event.start_s, event.rank))
    busy = [0.0] * schedule.ranks
    for event in ordered:
        if event.action.kind in COMPUTE:
            busy[event.rank] += times.of(event.action)
    return Timeline(
        events=tuple(event for event in ordered if event.action.kind in COMPUTE),
        transfers=tuple(event for event in ordered if event.action.kind not in COMPUTE),
        makespan_s=max(stop, default=0.0),
        busy_s=tuple(busy),
        in_flight=tuple(peak_held(rank) for rank in schedule.lists),
    )


def _walk(steps: Sequence[Step], durations: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the start times and the stop times of all steps, as two lists in the order of ``steps``."""
    start: list[float] = []
    stop: list[float] = []
    for here, (column, before, other, under_way) in enumerate(steps):
        now = stop[here - before] if before else 0.0
        if other:
            now = max(now, stop[here - other] + durations[under_way])
        start.append(now)
        stop.append(now + durations[column])
    return start, stop


def peak_held(actions: Sequence[Action], layers: Sequence[int] = ()) -> int:
    """Return the peak number of activations held, each from its forward pass to the last action that reads it.

    With ``layers``, the number of layers in each stage, the peak number of layers whose activations are held.
    Forward passes that no backward pass follows, as in frozen stages and evaluations, hold nothing.
    """
    halved = {(stage, batch) for kind, stage, batch in actions if kind == "W"}
    read = halved | {(stage, batch) for kind, stage, batch in actions if kind == "B"}
    live = peak = 0
    for kind, stage, batch in actions:
        size = layers[stage] if layers else 1
        if kind == "F":
            live += size * ((stage, batch) in read)
        elif kind == "W" or (kind == "B" and (stage, batch) not in halved):
            live -= size
        peak = max(peak, live)
    return peak

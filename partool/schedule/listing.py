"""List scheduling over ranks with several stages each: a free rank executes the action with the best priority.

Within a stage micro-batches keep their order, so the oldest micro-batch in flight is finished first. A rank has room
for the activations of ``room`` stages; activations are held from a forward pass to the last action that reads them. A
forward pass starts only if all micro-batches in flight can still be finished afterwards, oldest first, each within the
room (the banker's rule: Dijkstra, EWD 623). The action lists therefore never deadlock, however small the room is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from partool.schedule.actions import Action, Kind, Order

UNITS: dict[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Kind of action → units of time that an action of one stage takes in this module."""


class NextAction(NamedTuple):
    """An action that a rank could execute next."""

    kind: Kind
    stage: int
    batch: int
    before: str
    """Kind of the action that the rank executed last."""
    stages: int
    """Number of stages of the whole model."""
    chunks: int
    """Number of stages on a rank."""


Rule = Callable[[NextAction], tuple[float, ...]]
"""Function that returns the priority of an action; the action with the smallest value goes first."""


def backward_first(choice: NextAction) -> tuple[float, ...]:
    """Prefer backward passes, then the deepest forward pass (Liu et al., Hanayo, SC'23), then weight gradients.

    Ties go to the lowest micro-batch.
    """
    kind, stage, batch = choice[:3]
    return ("FW".find(kind) + 1, -stage if kind == "F" else 0, batch, -stage)


def in_turns(choice: NextAction) -> tuple[float, ...]:
    """Prefer a forward pass after a backward pass and a backward pass after a forward pass, as 1F1B's steady state."""
    same = (choice.kind == "F") == (choice.before == "F")
    return (choice.kind == "W", same, *backward_first(choice))


def forward_first(choice: NextAction) -> tuple[float, ...]:
    """Prefer the deepest forward pass that memory allows, so that later ranks get input even if the room is small."""
    kind, stage, batch = choice[:3]
    return (kind == "W", kind != "F", -stage, batch)


def paced(pace: float) -> Rule:
    """Return the rule that prefers the action that is due first.

    An action is due when it would start if one micro-batch entered every ``pace`` and no micro-batch waited. ``pace``
    is in units of a rank's work on one micro-batch. A longer pace gives older micro-batches more priority: a pace of 0
    sorts actions by stages alone, a long pace by micro-batches alone.
    """

    def due(choice: NextAction) -> tuple[float, ...]:
        kind, stage, batch, _, stages, chunks = choice
        way = stage * UNITS["F"] if kind == "F" else stages * UNITS["F"] + (stages - 1 - stage) * UNITS["B"]
        return (kind == "W", batch * pace * chunks * (UNITS["F"] + UNITS["B"]) + way, -stage)

    return due


class Policy(NamedTuple):
    """How to make action lists: the priority of actions, and limits on micro-batches and activations."""

    rule: Rule
    admitted: int
    """Maximum number of micro-batches that have begun their first forward pass but not finished all backward passes."""
    room: int
    """Maximum number of activations (of one stage and one micro-batch each) held on a rank."""
    spare: bool = False
    """True reserves room for all stages of the oldest micro-batch, False only for the stages that it has yet to run.
    With True, fewer micro-batches are in flight, and micro-batches wait less for each other."""


class Listed(NamedTuple):
    """Action lists with their total time and peak memory; tuples compare by time, then by memory (less is better)."""

    time: int
    peak: int
    """Peak number of activations (of one stage and one micro-batch each) on the fullest rank."""
    order: Order


def listed(placement: Sequence[int], ranks: int, micro_batches: int, policy: Policy, *, split: bool) -> Listed:
    """Return the action lists that a policy makes if transfers take no time; ``split`` splits backward passes in two.

    Raises ``ValueError`` if the room is too small for a single micro-batch.
    """
    run = _Run(placement, ranks, micro_batches, policy, split)
    now = 0
    while any(run.remaining):
        for rank in range(ranks):
            if run.free[rank] <= now and (choice := run.choose(rank, now)):
                run.do(rank, choice, now)
        # No action can start before a running action ends.
        running = [free for free in run.free if free > now]
        if not running and any(run.remaining):
            raise ValueError(f"room for {policy.room} stages is too little for a micro-batch's {run.chunks}")
        now = min(running, default=now)
    return Listed(max(run.free), max(run.peak), tuple(tuple(actions) for actions in run.lists))


class _Run:
    """Action lists under construction."""

    def __init__(self, placement: Sequence[int], ranks: int, micro_batches: int, policy: Policy, split: bool) -> None:
        self.placement, self.ranks, self.policy = placement, ranks, policy
        self.stages, self.chunks = len(placement), len(placement) // ranks
        self.back: Kind = "I" if split else "B"
        self.last: Kind = "W" if split else "B"
        kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
        self.ready: dict[tuple[Kind, int], list[int]] = {
            (kind, stage): [] for kind in kinds for stage in range(self.stages)
        }
        """(Kind, stage) → time at which each micro-batch whose input exists may start, by micro-batch."""
        self.ready["F", 0] = [0] * micro_batches
        self.executed = dict.fromkeys(self.ready, 0)
        """(Kind, stage) → number of micro-batches executed, which is also the index of the next micro-batch."""
        self.rank_keys = [[key for key in self.ready if placement[key[1]] == rank] for rank in range(ranks)]
        self.lists: list[list[Action]] = [[] for _ in range(ranks)]
        self.free, self.peak, self.live = [0] * ranks, [0] * ranks, [0] * ranks
        self.forward = [[0] * ranks for _ in range(micro_batches)]
        """Number of forward passes executed, by micro-batch and rank."""
        self.kept = [[0] * ranks for _ in range(micro_batches)]
        """Number of activations (of one stage each) still held, by micro-batch and rank."""
        self.remaining = [len(kinds) * self.stages] * micro_batches
        self.oldest = 0

    def choose(self, rank: int, now: int) -> NextAction | None:
        """Return the next action of a free rank; None if no action can start."""
        before = self.lists[rank][-1].kind if self.lists[rank] else self.back
        startable = []
        for key in self.rank_keys[rank]:
            batch = self.executed[key]
            times = self.ready[key]
            if batch < len(times) and times[batch] <= now:
                kind, stage = key
                if kind != "F" or self._may_begin(rank, stage, batch):
                    startable.append(NextAction(kind, stage, batch, before, self.stages, self.chunks))
        return min(startable, key=self.policy.rule) if len(startable) > 1 else startable[0] if startable else None

    def _may_begin(self, rank: int, stage: int, batch: int) -> bool:
        if stage == 0 and batch - self.executed[self.back, 0] >= self.policy.admitted:
            return False
        live, room = self.live[rank] + 1, self.policy.room
        if live > room or batch == self.oldest:
            return live <= room
        if live + self.chunks <= room:
            return True
        if self.policy.spare:
            return live - self.kept[self.oldest][rank] + self.chunks <= room
        for older in range(self.oldest, batch):
            # Older micro-batches are finished before a micro-batch's turn; activations of younger ones stay.
            if live + self.chunks - self.forward[older][rank] > room:
                return False
            live -= self.kept[older][rank]
        return True

    def do(self, rank: int, choice: NextAction, now: int) -> None:
        """Append an action to its rank's list, and mark the actions that wait for it as ready."""
        kind, stage, batch = choice[:3]
        self.lists[rank].append(Action(kind, stage, batch))
        self.executed[kind, stage] += 1
        stop = self.free[rank] = now + UNITS[kind]
        if kind == "F":
            self.live[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.live[rank])
            self.forward[batch][rank] += 1
            self.kept[batch][rank] += 1
            following = ("F", stage + 1) if stage + 1 < self.stages else (self.back, stage)
            self.ready[following].append(stop)  # type: ignore[index]
        elif kind == self.back:
            if stage:
                self.ready[self.back, stage - 1].append(stop)
            if kind != self.last:
                self.ready[self.last, stage].append(stop)
        if kind == self.last:
            self.live[rank] -= 1
            self.kept[batch][rank] -= 1
        self.remaining[batch] -= 1
        while self.oldest < len(self.remaining) - 1 and not self.remaining[self.oldest]:
            self.oldest += 1

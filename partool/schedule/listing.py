"""List scheduling over ranks that each run several stages: whenever a rank is free, it does what ranks first.

Within a stage micro-batches keep their order, so the oldest one under way is finished first. Memory is a number of
stages' activations per rank (``room``), held from a forward pass to the last action that reads them. A forward pass
starts only if afterwards the micro-batches under way can still all be finished, oldest first, each within the room
(the banker's rule: Dijkstra, EWD 623), so the lists never run into a dead end, however small the room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from partool.schedule.actions import Action, Kind, Order

UNITS: dict[str, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time that each action of a stage takes here."""


class NextAction(NamedTuple):
    """An action that a rank might do next."""

    kind: Kind
    stage: int
    batch: int
    before: str
    """Kind of the action that the rank did last."""
    stages: int
    """Stages of the whole model."""
    chunks: int
    """Stages of a rank."""


Rule = Callable[[NextAction], tuple[float, ...]]
"""The least goes first."""


def backward_first(choice: NextAction) -> tuple[float, ...]:
    """Prefer backward passes, then the deepest forward pass (Liu et al., Hanayo, SC'23), then weight gradients.

    Ties go to the lowest micro-batch.
    """
    kind, stage, batch = choice[:3]
    return ("FW".find(kind) + 1, -stage if kind == "F" else 0, batch, -stage)


def in_turns(choice: NextAction) -> tuple[float, ...]:
    """Prefer forward after backward and backward after forward, as 1F1B does in its steady state."""
    same = (choice.kind == "F") == (choice.before == "F")
    return (choice.kind == "W", same, *backward_first(choice))


def forward_first(choice: NextAction) -> tuple[float, ...]:
    """Prefer the deepest forward pass that memory allows: later ranks are fed where room is scarce."""
    kind, stage, batch = choice[:3]
    return (kind == "W", kind != "F", -stage, batch)


def paced(pace: float) -> Rule:
    """Return the rule that does first what was due first, if a micro-batch entered every ``pace`` and never waited.

    ``pace`` is in units of a rank's work on one micro-batch. Young micro-batches yield to old ones the more, the longer
    it is: 0 goes by stages alone, and a long one by micro-batches alone.
    """

    def due(choice: NextAction) -> tuple[float, ...]:
        kind, stage, batch, _, stages, chunks = choice
        way = stage * UNITS["F"] if kind == "F" else stages * UNITS["F"] + (stages - 1 - stage) * UNITS["B"]
        return (kind == "W", batch * pace * chunks * (UNITS["F"] + UNITS["B"]) + way, -stage)

    return due


class Policy(NamedTuple):
    """How to make lists: what goes first, and how much may be under way."""

    rule: Rule
    admitted: int
    """Most micro-batches between their first forward and their last backward pass."""
    room: int
    """Most activations of stages held on a rank."""
    spare: bool = False
    """True keeps room for all of the oldest micro-batch's stages, not only for those it has still to do: fewer
    micro-batches under way, which wait less for each other."""


class Listed(NamedTuple):
    """Lists, and what they cost: less is better, time first."""

    time: int
    peak: int
    """Activations of stages on the fullest rank."""
    order: Order


def listed(placement: Sequence[int], ranks: int, micro_batches: int, policy: Policy, *, split: bool) -> Listed:
    """Return the lists that a policy makes; ``split`` halves backward passes. Transfers take no time.

    Raises ``ValueError`` for room that a single micro-batch does not fit into.
    """
    run = _Run(placement, ranks, micro_batches, policy, split)
    now = 0
    while any(run.left):
        for rank in range(ranks):
            if run.free[rank] <= now and (choice := run.choose(rank, now)):
                run.do(rank, choice, now)
        # Nothing changes before some action ends.
        running = [free for free in run.free if free > now]
        if not running and any(run.left):
            raise ValueError(f"room for {policy.room} stages is too little for a micro-batch's {run.chunks}")
        now = min(running, default=now)
    return Listed(max(run.free), max(run.peak), tuple(tuple(actions) for actions in run.lists))


class _Run:
    """Lists on their way."""

    def __init__(self, placement: Sequence[int], ranks: int, micro_batches: int, policy: Policy, split: bool) -> None:
        self.placement, self.ranks, self.policy = placement, ranks, policy
        self.stages, self.chunks = len(placement), len(placement) // ranks
        self.back: Kind = "I" if split else "B"
        self.last: Kind = "W" if split else "B"
        kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
        self.ready: dict[tuple[Kind, int], list[int]] = {
            (kind, stage): [] for kind in kinds for stage in range(self.stages)
        }
        """Per kind and stage, when each micro-batch may start, in the order of micro-batches."""
        self.ready["F", 0] = [0] * micro_batches
        self.done = dict.fromkeys(self.ready, 0)
        """Micro-batches that are through: the next one's number."""
        self.own = [[key for key in self.ready if placement[key[1]] == rank] for rank in range(ranks)]
        self.lists: list[list[Action]] = [[] for _ in range(ranks)]
        self.free, self.peak, self.held = [0] * ranks, [0] * ranks, [0] * ranks
        self.forward = [[0] * ranks for _ in range(micro_batches)]
        """Per micro-batch and rank: forward passes done."""
        self.kept = [[0] * ranks for _ in range(micro_batches)]
        """Of these, activations held."""
        self.left = [len(kinds) * self.stages] * micro_batches
        self.oldest = 0

    def choose(self, rank: int, now: int) -> NextAction | None:
        """Return what a free rank does now, None if there is nothing."""
        before = self.lists[rank][-1].kind if self.lists[rank] else self.back
        found = []
        for key in self.own[rank]:
            batch = self.done[key]
            times = self.ready[key]
            if batch < len(times) and times[batch] <= now:
                kind, stage = key
                if kind != "F" or self._may_begin(rank, stage, batch):
                    found.append(NextAction(kind, stage, batch, before, self.stages, self.chunks))
        return min(found, key=self.policy.rule) if len(found) > 1 else found[0] if found else None

    def _may_begin(self, rank: int, stage: int, batch: int) -> bool:
        if stage == 0 and batch - self.done[self.back, 0] >= self.policy.admitted:
            return False
        held, room = self.held[rank] + 1, self.policy.room
        if held > room or batch == self.oldest:
            return held <= room
        if held + self.chunks <= room:
            return True
        if self.policy.spare:
            return held - self.kept[self.oldest][rank] + self.chunks <= room
        for older in range(self.oldest, batch):
            # Those before it are gone when a micro-batch has its turn; what younger ones hold stays.
            if held + self.chunks - self.forward[older][rank] > room:
                return False
            held -= self.kept[older][rank]
        return True

    def do(self, rank: int, choice: NextAction, now: int) -> None:
        """Append an action to its rank's list, and make ready what needs it."""
        kind, stage, batch = choice[:3]
        self.lists[rank].append(Action(kind, stage, batch))
        self.done[kind, stage] += 1
        stop = self.free[rank] = now + UNITS[kind]
        if kind == "F":
            self.held[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.held[rank])
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
            self.held[rank] -= 1
            self.kept[batch][rank] -= 1
        self.left[batch] -= 1
        while self.oldest < len(self.left) - 1 and not self.left[self.oldest]:
            self.oldest += 1

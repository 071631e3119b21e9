"""What must hold of a schedule before anything runs it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from itertools import count
from typing import NamedTuple

from partool.schedule.actions import COMPUTE, SHIFTS, Action, Schedule, peer
from partool.schedule.needs import Needs
from partool.schedule.simulate import peak_held
from partool.schedule.steps import Link, wire
from partool.schedule.travelling import gradients_lost, weights_missing

_MOST = 20
"""Faults that are told: one wrong number may make thousands."""


class Problem(NamedTuple):
    """What is wrong with a schedule; rank and place in its list are -1 where no single one is to blame."""

    message: str
    rank: int = -1
    at: int = -1


def validate(
    schedule: Schedule, cap: int | None = None, room: int | None = None, done: Iterable[Action] = ()
) -> list[str]:
    """Return what is wrong, in words; empty if the schedule is sound. See :func:`problems`."""
    return [problem.message for problem in problems(schedule, cap, room, done)]


def problems(
    schedule: Schedule, cap: int | None = None, room: int | None = None, done: Iterable[Action] = ()
) -> list[Problem]:
    """Return what is wrong, the first 20 faults of it; empty if the schedule is sound.

    Each stage works once on each micro-batch, on the rank that the placement names: forward, and from ``trained_from``
    on backward, whole or in both halves. For every ordered pair of ranks the k-th send is the k-th receive, activations
    and gradients alike: the wire knows no names, and both have the same shape, so a mismatch would go unseen (only the
    gradients of travelling weights have wires of their own, as they may be of another type). No rank
    computes on, or sends, what it does not have. The lists finish when sends are buffered without limit, or when each
    ordered pair of ranks has ``room`` for that many messages that are not received yet (``None``: without limit;
    :func:`receive_depth` tells how much they need). No rank holds the activations of more than ``cap`` micro-batches,
    each as many stages as the rank has (``None`` or 0: no bound).

    Where weights travel, a micro-batch stays on one rank, which needs the weights of each stage that it works on, and
    every gradient comes home to the stage's owner once.

    ``done`` are compute actions before the lists, whose results are where they are needed: the lists are the rest of a
    schedule that has been interrupted.
    """
    found = _faults(schedule, cap, room, done)
    more = len(found) - _MOST
    return [*found[:_MOST], Problem(f"and {more} more")] if more > 0 else found


def _faults(schedule: Schedule, cap: int | None, room: int | None, done: Iterable[Action]) -> list[Problem]:
    if broken := list(_misshapen(schedule)):
        return broken
    before = frozenset(action for action in done if action.kind in COMPUTE)
    found = [*_incomplete(schedule, before), *_elsewhere(schedule)]
    if any("no stage" in problem.message for problem in found):
        return found
    found += _unpaired(schedule)
    if not found and (stuck := _stuck(schedule, room, before)):
        how = "with buffered sends" if room is None else f"with room for {_messages(room)} per pair of ranks"
        where = ", ".join(f"rank {rank} at {tuple(schedule.lists[rank][at])}" for rank, at in stuck)
        found.append(Problem(f"the lists cannot finish {how}: {where}", *stuck[0]))
    if schedule.moves == "weights" and not found:
        found += [Problem(*fault) for fault in (*weights_missing(schedule), *gradients_lost(schedule))]
    return [*found, *(_too_full(schedule, cap) if cap else ())]


def receive_depth(schedule: Schedule, done: Iterable[Action] = ()) -> int:
    """Return the least room per ordered pair of ranks, in messages not received yet, with which the lists finish.

    A rank that posts this many receives ahead for each peer cannot be the reason that a send waits for ever.
    ``done`` is that of :func:`problems`. Raises ``ValueError`` where the lists cannot finish with any room.
    """
    before = frozenset(action for action in done if action.kind in COMPUTE)
    if stuck := _stuck(schedule, None, before):
        raise ValueError(f"the lists cannot finish: rank {stuck[0][0]} waits")
    # More room never hurts, and no pair can have more messages under way than it has in all.
    return next(room for room in count(1) if not _stuck(schedule, room, before))


def _messages(number: int) -> str:
    return "one message" if number == 1 else f"{number} messages"


def _misshapen(schedule: Schedule) -> Iterator[Problem]:
    ranks, stages = schedule.ranks, schedule.stages
    if len(schedule.lists) != ranks:
        yield Problem(f"{len(schedule.lists)} lists for {ranks} ranks")
    if min(ranks, stages, schedule.micro_batches) < 1:
        yield Problem(f"{ranks} ranks, {stages} stages and {schedule.micro_batches} micro-batches: none may be missing")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < ranks:
            yield Problem(f"stage {stage} is on rank {rank}, which is not one of {ranks}")
    if not 0 <= schedule.trained_from <= stages:
        yield Problem(f"the first trained stage is {schedule.trained_from}, of {stages} stages")


def _incomplete(schedule: Schedule, before: Set[Action]) -> Iterator[Problem]:
    counts = Counter(action for actions in (before, *schedule.lists) for action in actions)
    for stage, rank in enumerate(schedule.placement):
        for batch in range(schedule.micro_batches):
            split = counts[Action("I", stage, batch)] or counts[Action("W", stage, batch)]
            backward = () if stage < schedule.trained_from else ("I", "W") if split else ("B",)
            for kind in ("F", *backward):
                if (times := counts.pop(Action(kind, stage, batch), 0)) != 1:
                    # Where weights travel, the rank of a micro-batch follows from the lists alone.
                    blamed = rank if schedule.moves == "activations" else -1
                    yield Problem(f"{kind} of stage {stage} on micro-batch {batch} runs {times} times", blamed)
    for rank, actions in enumerate(schedule.lists):
        for at, action in enumerate(actions):
            if action not in counts:
                continue
            if action.kind in COMPUTE:
                yield Problem(f"rank {rank}: unknown action {tuple(action)}", rank, at)
            elif (times := counts[action]) > 1:
                yield Problem(f"rank {rank}: {tuple(action)} is done {times} times", rank, at)


def _elsewhere(schedule: Schedule) -> Iterator[Problem]:
    """Yield actions that are not their rank's."""
    batch_of: dict[int, int] = {}
    for rank, actions in enumerate(schedule.lists):
        for at, action in enumerate(actions):
            if message := _misplaced(schedule, rank, action, batch_of):
                yield Problem(f"rank {rank}{message}", rank, at)


def _misplaced(schedule: Schedule, rank: int, action: Action, batch_of: dict[int, int]) -> str:
    there, other = (rank, action) if action.kind in COMPUTE else peer(schedule, rank, action)
    if not all(0 <= stage < schedule.stages for stage in (action.stage, other.stage)):
        return f": {tuple(action)} names no stage"
    if (action.kind in SHIFTS) != (schedule.moves == "weights") and action.kind not in COMPUTE:
        return f": {tuple(action)} moves what stays in this schedule"
    if schedule.moves == "activations" and schedule.placement[action.stage] != rank:
        return f" runs {tuple(action)} of a stage that is not its own"
    if schedule.moves == "weights" and action.kind in COMPUTE:
        first = batch_of.setdefault(action.micro_batch, rank)
        return f" runs {tuple(action)} of a micro-batch that rank {first} has begun" if first != rank else ""
    if action.kind in ("SEND_B", "RECV_B") and min(action.stage, other.stage) < schedule.trained_from:
        return f": {tuple(action)} takes a gradient to a stage that has no backward pass"
    return f": {tuple(action)} transfers to itself" if action.kind not in COMPUTE and there == rank else ""


def _unpaired(schedule: Schedule) -> Iterator[Problem]:
    sent: dict[Link, list[Action]] = defaultdict(list)
    received: dict[Link, list[tuple[Action, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.lists):
        for at, action in enumerate(actions):
            if action.kind.startswith("SEND"):
                sent[wire(schedule, rank, action)].append(peer(schedule, rank, action)[1])
            elif action.kind not in COMPUTE:
                received[wire(schedule, rank, action)].append((action, at))
    for link in sorted({*sent, *received}):
        out, into = sent[link], received[link]
        wrong = next((k for k, (a, (b, _)) in enumerate(zip(out, into, strict=False)) if a != b), None)
        name = f"from rank {link[0]} to {link[1]}"
        if wrong is not None:
            got, at = into[wrong]
            message = f"{name}: message {wrong} is sent for {tuple(out[wrong])}, received by {tuple(got)}"
            yield Problem(message, link[1], at)
        elif len(out) != len(into):
            counted = "1 message is" if len(out) == 1 else f"{len(out)} messages are"
            yield Problem(f"{name}: {counted} sent, {len(into)} received", link[1])


def _too_full(schedule: Schedule, cap: int) -> Iterator[Problem]:
    for rank, actions in enumerate(schedule.lists):
        share = len({action.stage for action in actions if action.kind in COMPUTE})
        if (peak := peak_held(actions)) > cap * share:
            held = f"activations of {peak} stages and micro-batches"
            yield Problem(f"rank {rank} holds {held}, more than {cap} micro-batches of {share} stages", rank)


def _stuck(schedule: Schedule, room: int | None, before: Set[Action]) -> list[tuple[int, int]]:
    """Run the lists; return where ranks wait for ever: (rank, place). A send waits while its pair has no room."""
    wires = _Wires(schedule, room, before)
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions) and wires.take(rank, actions[at[rank]]):
                at[rank] += 1
                moved = True
    return [(rank, place) for rank, place in enumerate(at) if place < len(schedule.lists[rank])]


def _message(made: Action) -> Action:
    """Return the receive of what an action makes."""
    forward = made.kind == "F"
    return Action("RECV_F" if forward else "RECV_B", made.stage + (1 if forward else -1), made.micro_batch)


class _Wires:
    """What is done, and how many messages each wire has under way."""

    def __init__(self, schedule: Schedule, room: int | None, before: Set[Action]) -> None:
        self.schedule, self.room, self.needs = schedule, room, Needs(schedule, before)
        self.done = {*before, *map(_message, before)}
        self.under_way: Counter[Link] = Counter()

    def take(self, rank: int, action: Action) -> bool:
        """Do an action of a rank; return False if it has to wait."""
        kind, stage, batch = action
        if kind in COMPUTE:
            ready = all(need in self.done for need in self.needs.of(action))
            if ready:
                self.done.add(action)
            return ready
        link = wire(self.schedule, rank, action)
        if kind.startswith("SEND"):
            ready = self.room is None or self.under_way[link] < self.room
            if kind not in SHIFTS:
                made = Action("F" if kind == "SEND_F" else self.needs.backward(stage, batch), stage, batch)
                ready = ready and made in self.done
            self.under_way[link] += ready
            return ready
        ready = self.under_way[link] > 0
        self.under_way[link] -= ready
        if ready and kind not in SHIFTS:
            self.done.add(action)
        return ready

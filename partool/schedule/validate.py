"""Check the rules that a schedule must satisfy before the schedule runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from itertools import count

from partool.schedule.actions import COMPUTE, SHIFTS, Action, Schedule, peer
from partool.schedule.faults import NO_STAGE, ScheduleFault, are, cell_faults, missing, missing_words, named
from partool.schedule.simulate import peak_held
from partool.schedule.steps import Link, Needs, wire
from partool.schedule.text import cell
from partool.schedule.travelling import gradients_lost, weights_missing

_MOST = 5
"""Number of faults reported: one wrong number may cause thousands."""


def validate(
    schedule: Schedule, cap: int | None = None, room: int | None = None, executed: Iterable[Action] = ()
) -> list[str]:
    """Return the faults as messages; empty if the schedule is valid. See :func:`problems`."""
    return [problem.message for problem in problems(schedule, cap, room, executed)]


def problems(
    schedule: Schedule, cap: int | None = None, room: int | None = None, executed: Iterable[Action] = ()
) -> list[ScheduleFault]:
    """Return the first 5 faults, faults of single cells first; empty if the schedule is valid.

    Each stage executes each micro-batch once, on the rank that the placement names: forward, and from stage
    ``trained_from`` on backward, whole or split into gradients of inputs and of weights. For every ordered pair of
    ranks the k-th send is the k-th receive, activations and gradients alike: messages carry no names, and both have the
    same shape, so a mismatch would go unnoticed (only gradients that are sent around a ring have separate links, as
    their type may differ). No rank computes on, or sends, a tensor that it does not have. The lists finish if each
    ordered pair of ranks buffers up to ``room`` messages that are not received yet (``None`` means without limit;
    :func:`receive_depth` returns the room needed). No rank holds the activations of more than ``cap`` micro-batches,
    each of as many stages as the rank has (``None`` or 0 means no bound).

    If weights are sent around a ring, a micro-batch stays on one rank, which needs the weights of each stage that it
    computes, and every gradient reaches the stage's owner once.

    ``executed`` are compute actions that ran before the lists begin, whose results are where they are needed: the lists
    are the rest of a schedule that has been interrupted.
    """
    faults = _faults(schedule, cap, room, executed)
    more = len(faults) - _MOST
    return [*faults[:_MOST], ScheduleFault(f"and {more} more")] if more > 0 else faults


def _faults(schedule: Schedule, cap: int | None, room: int | None, executed: Iterable[Action]) -> list[ScheduleFault]:
    if broken := list(_misshapen(schedule)):
        return broken
    before = frozenset(action for action in executed if action.kind in COMPUTE)
    schedule = schedule if before else _of_usual_length(schedule)
    lost = missing(schedule, before)
    faults = [*cell_faults(schedule, before), *_elsewhere(schedule), *missing_words(schedule, lost)]
    if any(NO_STAGE in problem.message for problem in faults):
        return faults
    faults += _unpaired(schedule, {(action.kind == "F", *action[1:]) for action in lost})
    if not faults and (stuck := _stuck(schedule, room, before)):
        how = "with buffered sends" if room is None else f"with room for {_messages(room)} per pair of ranks"
        where = [f"rank {rank} at {cell(schedule.lists[rank][at])}" for rank, at in stuck]
        more = f" and {len(where) - _MOST} more" if len(where) > _MOST else ""
        faults.append(ScheduleFault(f"the lists cannot finish {how}: {', '.join(where[:_MOST])}{more}", *stuck[0]))
    if schedule.moves == "weights" and not faults:
        faults += [ScheduleFault(*fault) for fault in (*weights_missing(schedule), *gradients_lost(schedule))]
    return [*faults, *(_too_full(schedule, cap) if cap else ())]


def _of_usual_length(schedule: Schedule) -> Schedule:
    """Return the schedule without final micro-batches that few cells name, as these cells are typing mistakes."""
    counts = Counter(action.micro_batch for actions in schedule.lists for action in actions if action.kind in COMPUTE)
    most = max(counts.values(), default=0)
    usual = 1 + max((batch for batch, times in counts.items() if 2 * times > most), default=-1)
    beyond = any(batch >= usual for batch in counts)
    return replace(schedule, micro_batches=usual) if beyond and usual < schedule.micro_batches else schedule


def receive_depth(schedule: Schedule, executed: Iterable[Action] = ()) -> int:
    """Return the smallest room per ordered pair of ranks, in messages not received yet, that lets the lists finish.

    With this many receives posted ahead for each peer, no send waits forever. ``executed`` is as in :func:`problems`.
    Raises ``ValueError`` where the lists cannot finish with any room.
    """
    before = frozenset(action for action in executed if action.kind in COMPUTE)
    if stuck := _stuck(schedule, None, before):
        raise ValueError(f"the lists cannot finish: rank {stuck[0][0]} waits")
    # More room never hurts, and no pair can have more messages in flight than it has in total.
    return next(room for room in count(1) if not _stuck(schedule, room, before))


def _messages(number: int) -> str:
    return "one message" if number == 1 else f"{number} messages"


def _misshapen(schedule: Schedule) -> Iterator[ScheduleFault]:
    ranks, stages = schedule.ranks, schedule.stages
    if len(schedule.lists) != ranks:
        yield ScheduleFault(f"{len(schedule.lists)} lists for {ranks} ranks")
    if min(ranks, stages, schedule.micro_batches) < 1:
        yield ScheduleFault(
            f"{ranks} ranks, {stages} stages and {schedule.micro_batches} micro-batches: none may be missing"
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < ranks:
            yield ScheduleFault(f"stage {stage} is on rank {rank}, which is not one of {ranks}")
    if not 0 <= schedule.trained_from <= stages:
        yield ScheduleFault(f"the first trained stage is {schedule.trained_from}, of {stages} stages")


def _elsewhere(schedule: Schedule) -> Iterator[ScheduleFault]:
    """Yield a fault for each rank and reason why actions do not belong on this rank."""
    batch_of: dict[int, int] = {}
    for rank, actions in enumerate(schedule.lists):
        positions: dict[str, list[int]] = defaultdict(list)
        for at, action in enumerate(actions):
            if reason := _misplaced(schedule, rank, action, batch_of):
                positions[reason].append(at)
        for reason, places in positions.items():
            yield ScheduleFault(f"{named([actions[at] for at in places])}: {reason}", rank, places[0])


def _misplaced(schedule: Schedule, rank: int, action: Action, batch_of: dict[int, int]) -> str:
    other_rank, other = (rank, action) if action.kind in COMPUTE else peer(schedule, rank, action)
    for stage in (action.stage, other.stage):
        if not 0 <= stage < schedule.stages:
            return f"{NO_STAGE} {stage}"
    if (action.kind in SHIFTS) != (schedule.moves == "weights") and action.kind not in COMPUTE:
        return "moves what stays in this schedule"
    if schedule.moves == "activations" and (home := schedule.placement[action.stage]) != rank:
        return f"stage {action.stage} is on rank {home}, not on rank {rank}"
    if schedule.moves == "weights" and action.kind in COMPUTE:
        first = batch_of.setdefault(action.micro_batch, rank)
        return f"rank {rank} runs a micro-batch that rank {first} has begun" if first != rank else ""
    if action.kind in ("SEND_B", "RECV_B") and min(action.stage, other.stage) < schedule.trained_from:
        return "takes a gradient to a stage that has no backward pass"
    return "transfers to itself" if action.kind not in COMPUTE and other_rank == rank else ""


def _unpaired(schedule: Schedule, lost: Set[tuple[bool, int, int]]) -> Iterator[ScheduleFault]:
    """Yield a fault for each transfer without another end, and for links whose messages are in the wrong order.

    ``lost`` are missing passes, as (forward, stage, micro-batch); their messages are missing too.
    """
    sent: dict[Link, list[tuple[Action, Action]]] = defaultdict(list)
    received: dict[Link, list[tuple[Action, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.lists):
        for at, action in enumerate(actions):
            if action.kind in COMPUTE or (action.kind not in SHIFTS and action.micro_batch >= schedule.micro_batches):
                continue  # this cell's micro-batch number is at fault, not its other end
            other_rank, other = peer(schedule, rank, action)
            ends = {(end.kind.endswith("_F"), *end[1:]) for end in (action, other) if end.kind not in SHIFTS}
            if ends & lost:
                continue
            if other_rank < 0:
                yield ScheduleFault(f"{cell(action)}: its other end, {cell(other)}, is missing", rank, at)
            elif action.kind.startswith("SEND"):
                sent[wire(schedule, rank, action)].append((other, action))
            else:
                received[wire(schedule, rank, action)].append((action, at))
    for link in sorted({*sent, *received}):
        yield from _on_wire(schedule, link, sent[link], received[link])


def _on_wire(
    schedule: Schedule, link: Link, sent: list[tuple[Action, Action]], received: list[tuple[Action, int]]
) -> Iterator[ScheduleFault]:
    """Yield faults for the transfers of one link that have no other end, or whose ends are in different orders."""
    start, end = link[0], link[1]
    arriving, taken = {receive for receive, _ in sent}, {receive for receive, _ in received}
    if waiting := [receive for receive, _ in received if receive not in arriving]:
        sends = [peer(schedule, end, receive)[1] for receive in waiting]
        yield ScheduleFault(f"{named(sends)} {are(sends)} missing: rank {end} waits at {named(waiting)}", start)
    if unreceived := [(receive, send) for receive, send in sent if receive not in taken]:
        receives, sends = [receive for receive, _ in unreceived], [send for _, send in unreceived]
        yield ScheduleFault(f"{named(receives)} {are(receives)} missing: rank {start} sends {named(sends)}", end)
    if arriving != taken:
        return
    for number, ((receive, send), (got, at)) in enumerate(zip(sent, received, strict=False), 1):
        if receive != got:
            both = f"message {number} is {cell(send)} where it is sent, {cell(got)} where it is received"
            yield ScheduleFault(f"from rank {start} to {end}: {both}", end, at)
            return


def _too_full(schedule: Schedule, cap: int) -> Iterator[ScheduleFault]:
    for rank, actions in enumerate(schedule.lists):
        share = len({action.stage for action in actions if action.kind in COMPUTE})
        if (peak := peak_held(actions)) > cap * share:
            load = f"activations of {peak} stages and micro-batches"
            yield ScheduleFault(f"rank {rank} holds {load}, more than {cap} micro-batches of {share} stages", rank)


def _stuck(schedule: Schedule, room: int | None, before: Set[Action]) -> list[tuple[int, int]]:
    """Run the lists; return (rank, position) of actions that wait forever. A send waits while its link has no room."""
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
    """Return the action that receives the result of ``made``."""
    forward = made.kind == "F"
    return Action("RECV_F" if forward else "RECV_B", made.stage + (1 if forward else -1), made.micro_batch)


class _Wires:
    """State while lists are run: the actions that are done, and the messages in flight on each link."""

    def __init__(self, schedule: Schedule, room: int | None, before: Set[Action]) -> None:
        self.schedule, self.room, self.needs = schedule, room, Needs(schedule, before)
        self.executed = {*before, *map(_message, before)}
        self.under_way: Counter[Link] = Counter()

    def take(self, rank: int, action: Action) -> bool:
        """Execute an action of a rank; return False if it has to wait."""
        kind, stage, batch = action
        if kind in COMPUTE:
            ready = all(need in self.executed for need in self.needs.of(action))
            if ready:
                self.executed.add(action)
            return ready
        link = wire(self.schedule, rank, action)
        if kind.startswith("SEND"):
            ready = self.room is None or self.under_way[link] < self.room
            if kind not in SHIFTS:
                made = Action("F" if kind == "SEND_F" else self.needs.backward(stage, batch), stage, batch)
                ready = ready and made in self.executed
            self.under_way[link] += ready
            return ready
        ready = self.under_way[link] > 0
        self.under_way[link] -= ready
        if ready and kind not in SHIFTS:
            self.executed.add(action)
        return ready

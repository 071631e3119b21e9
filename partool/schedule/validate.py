"""What must hold of a schedule before anything runs it."""

from __future__ import annotations

from collections import Counter, defaultdict

from partool.schedule.actions import COMPUTE, Action, Kind, Schedule
from partool.schedule.simulate import needed

Pair = tuple[int, int]
"""Sending and receiving rank."""


def validate(schedule: Schedule) -> list[str]:
    """Return what is wrong, in words; empty if the schedule is sound.

    Each stage works once on each micro-batch, on the rank that the placement names. For every ordered pair of ranks the
    k-th send is the k-th receive, activations and gradients alike: the wire knows no names, and both have the same
    shape, so a mismatch would go unseen. No rank computes on, or sends, what it does not have. The lists finish when
    sends are buffered without limit, and when each pair has room for one message that is not received yet.
    """
    found = [*_complete(schedule), *_on_their_ranks(schedule)]
    if any("no stage" in problem for problem in found):
        return found
    found += _paired(schedule)
    for room in () if found else (None, 1):
        if stuck := _stuck(schedule, room):
            how = "with buffered sends" if room is None else "with room for one message per pair of ranks"
            found.append(f"the lists cannot finish {how}: {stuck}")
            break
    return found


def peer(schedule: Schedule, action: Action) -> Action:
    """Return the other end of a transfer."""
    kind, stage, batch = action
    if kind == "SEND_F":
        return Action("RECV_F", stage + 1, batch)
    if kind == "SEND_B":
        return Action("RECV_B", stage - 1, batch)
    return Action("SEND_F", stage - 1, batch) if kind == "RECV_F" else Action("SEND_B", stage + 1, batch)


def _complete(schedule: Schedule) -> list[str]:
    counts = Counter(action for actions in schedule.lists for action in actions)
    computed = [action for action in counts if action.kind in COMPUTE]
    found = []
    for stage in range(schedule.stages):
        halved = any(action.kind in ("I", "W") and action.stage == stage for action in computed)
        for batch in range(schedule.micro_batches):
            for kind in ("F", "I", "W") if halved else ("F", "B"):
                times = counts.pop(Action(kind, stage, batch), 0)
                if times != 1:
                    found.append(f"{kind} of stage {stage} on micro-batch {batch} runs {times} times")
    found += [f"unknown action {tuple(action)}" for action in counts if action.kind in COMPUTE]
    found += [f"{tuple(action)} is done {times} times" for action, times in counts.items() if times > 1]
    return found


def _on_their_ranks(schedule: Schedule) -> list[str]:
    found = []
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            ends = [action] if action.kind in COMPUTE else [action, peer(schedule, action)]
            if any(not 0 <= end.stage < schedule.stages for end in ends):
                found.append(f"rank {rank}: {tuple(action)} names no stage")
                continue
            ranks = [schedule.placement[end.stage] for end in ends]
            if ranks[0] != rank:
                found.append(f"rank {rank} runs {tuple(action)} of a stage that is not its own")
            elif ranks[1:] == [rank]:
                found.append(f"rank {rank}: {tuple(action)} transfers to itself")
    return found


def _paired(schedule: Schedule) -> list[str]:
    sent: dict[Pair, list[Action]] = defaultdict(list)
    received: dict[Pair, list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            if action.kind.startswith("SEND"):
                sent[_pair(schedule, rank, action)].append(peer(schedule, action))
            elif action.kind.startswith("RECV"):
                received[_pair(schedule, rank, action)].append(action)
    found = []
    for pair in sorted({*sent, *received}):
        out, into = sent[pair], received[pair]
        at = next((k for k, (a, b) in enumerate(zip(out, into, strict=False)) if a != b), None)
        if at is not None:
            found.append(
                f"from rank {pair[0]} to {pair[1]}: message {at} is sent for {tuple(out[at])}, "
                f"received by {tuple(into[at])}"
            )
        elif len(out) != len(into):
            found.append(f"from rank {pair[0]} to {pair[1]}: {len(out)} messages are sent, {len(into)} received")
    return found


def _pair(schedule: Schedule, rank: int, action: Action) -> Pair:
    other = schedule.placement[peer(schedule, action).stage]
    return (rank, other) if action.kind.startswith("SEND") else (other, rank)


def _stuck(schedule: Schedule, room: int | None) -> str:
    """Run the lists; return where ranks wait for ever, empty if none does. A send waits while its pair has no room."""
    wires = _Wires(schedule, room)
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions) and wires.take(rank, actions[at[rank]]):
                at[rank] += 1
                moved = True
    ends = [(rank, schedule.lists[rank][i]) for rank, i in enumerate(at) if i < len(schedule.lists[rank])]
    return ", ".join(f"rank {rank} at {tuple(action)}" for rank, action in ends)


class _Wires:
    """What is done, and how many messages each pair of ranks has under way."""

    def __init__(self, schedule: Schedule, room: int | None) -> None:
        self.schedule, self.room = schedule, room
        self.done: set[Action] = set()
        self.under_way: Counter[Pair] = Counter()

    def take(self, rank: int, action: Action) -> bool:
        """Do an action of a rank; return False if it has to wait."""
        kind, stage, batch = action
        if kind in COMPUTE:
            ready = all(need in self.done for need in needed(self.schedule, action))
        elif kind.startswith("SEND"):
            made: tuple[Kind, ...] = ("F",) if kind == "SEND_F" else ("B", "I")
            pair = _pair(self.schedule, rank, action)
            ready = any(Action(what, stage, batch) in self.done for what in made)
            ready = ready and (self.room is None or self.under_way[pair] < self.room)
            self.under_way[pair] += ready
        else:
            pair = _pair(self.schedule, rank, action)
            ready = self.under_way[pair] > 0
            self.under_way[pair] -= ready
        if ready:
            self.done.add(action)
        return ready

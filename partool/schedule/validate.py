"""What must hold of a schedule before anything runs it."""

from __future__ import annotations

from collections import Counter, defaultdict

from partool.schedule.actions import COMPUTE, Action, Schedule
from partool.schedule.simulate import inputs


def validate(schedule: Schedule) -> list[str]:
    """Return what is wrong, in words; empty if the schedule is sound.

    Each stage works once on each micro-batch, on the rank that the placement names; inputs come before what needs them;
    for every ordered pair of ranks the k-th send of activations (of gradients) is the k-th receive; and the lists
    finish with one message per pair under way.
    """
    found = [*_complete(schedule), *_paired(schedule)]
    return found or _finishes(schedule)


def _complete(schedule: Schedule) -> list[str]:
    found = []
    counts = Counter(action for actions in schedule.lists for action in actions if action.kind in COMPUTE)
    halved = any(action.kind in ("I", "W") for action in counts)
    kinds = ("F", "I", "W") if halved else ("F", "B")
    for stage in range(schedule.stages):
        for batch in range(schedule.micro_batches):
            for kind in kinds:
                times = counts.pop(Action(kind, stage, batch), 0)  # type: ignore[arg-type]
                if times != 1:
                    found.append(f"{kind} of stage {stage} on micro-batch {batch} runs {times} times")
    found += [f"unknown action {tuple(action)}" for action in counts]
    for rank, actions in enumerate(schedule.lists):
        strangers = {a.stage for a in actions if 0 <= a.stage < schedule.stages and schedule.placement[a.stage] != rank}
        found += [f"rank {rank} runs stage {stage}, which is not its own" for stage in sorted(strangers)]
    return found


def _paired(schedule: Schedule) -> list[str]:
    sent: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.lists):
        for kind, stage, batch in actions:
            step = 1 if kind.endswith("_F") else -1
            if kind.startswith("SEND"):
                sent[rank, schedule.placement[stage + step], kind[-1]].append((stage + step, batch))
            elif kind.startswith("RECV"):
                received[schedule.placement[stage - step], rank, kind[-1]].append((stage, batch))
    found = []
    for pair in sorted({*sent, *received}):
        if sent[pair] != received[pair]:
            at = next((k for k, (a, b) in enumerate(zip(sent[pair], received[pair], strict=False)) if a != b), "last")
            found.append(f"from rank {pair[0]} to {pair[1]}: message {at} of kind {pair[2]} is not the one received")
    return found


def _finishes(schedule: Schedule) -> list[str]:
    """Run the lists with one message per ordered pair and kind under way; a rank waits while that is not taken."""
    done: set[Action] = set()
    under_way: set[tuple[int, int, str]] = set()
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions) and _step(schedule, rank, actions[at[rank]], done, under_way):
                at[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {tuple(schedule.lists[rank][i])}" for rank, i in enumerate(at) if i < len(schedule.lists[rank])
    ]
    return [f"the lists cannot finish: {', '.join(stuck)}"] if stuck else []


def _step(
    schedule: Schedule, rank: int, action: Action, done: set[Action], under_way: set[tuple[int, int, str]]
) -> bool:
    kind, stage, _ = action
    step = 1 if kind.endswith("_F") else -1
    if kind in COMPUTE:
        for need, neighbour in inputs(action, schedule.stages, kind == "I"):
            away = neighbour and schedule.placement[need.stage] != rank
            got = Action("RECV_F" if kind == "F" else "RECV_B", stage, action.micro_batch) if away else need
            if got not in done:
                return False
        done.add(action)
        return True
    if kind.startswith("SEND"):
        made = [Action(what, stage, action.micro_batch) for what in (("F",) if kind == "SEND_F" else ("B", "I"))]  # type: ignore[arg-type]
        pair = rank, schedule.placement[stage + step], kind[-1]
        if pair in under_way or not any(one in done for one in made):
            return False
        under_way.add(pair)
        return True
    pair = schedule.placement[stage - step], rank, kind[-1]
    if pair not in under_way:
        return False
    under_way.remove(pair)
    done.add(action)
    return True

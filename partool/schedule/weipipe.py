"""WeiPipe: micro-batches stay on their rank, weights and gradients are sent around a ring (Lin et al., PPoPP'25).

Micro-batch ``m`` runs through all stages on rank ``m mod ranks``. Each stage has an owner, rank ``(stage + 1) mod
ranks``, that keeps its parameters and optimizer states. A schedule is a sequence of *turns*, the same on every rank; a
turn has at most one pass with graph and one pass without graph, each over one stage. For a pass the stage's weights are
sent from their owner to rank 0 and then from rank to rank; each rank passes them on at once, so each rank executes a
turn shortly after the rank before. Gradients follow the backward pass from rank to rank, each rank adding its
gradients; the sums end at the stage's owner. Gradients of the ranks behind the owner return to it from the last rank.

Unneeded transfers of the paper's ring are left out, so each pass moves ``ranks - 1`` copies instead of at least
``ranks``: owners are not sent their own weights, empty gradient sums are not sent, nothing circulates before the first
and after the last pass, and the weights of a stage that the next turn uses too are kept until that turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from partool.schedule.actions import Action, Order, Schedule


class StagePass(NamedTuple):
    """Pass over one stage in a turn; each rank runs it on one micro-batch of a round of ``ranks`` micro-batches."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    round: int


Turn = tuple[StagePass, ...]
Turns = Callable[[int, int], list[Turn]]
"""Function of (number of stages, number of rounds) that returns the turns."""


def owner(stage: int, ranks: int) -> int:
    """Return the rank that keeps a stage's parameters."""
    return (stage + 1) % ranks


def interleave(stages: int, rounds: int) -> list[Turn]:
    """Return WeiPipe-Interleave: a turn has the backward pass of one round and the forward pass of the next."""
    found: list[Turn] = []
    for turn in range(stages * (rounds + 1)):
        number, place = divmod(turn, stages)
        back = (StagePass("B", stages - 1 - place, number - 1),) if number else ()
        found.append((*back, *((StagePass("F", place, number),) if number < rounds else ())))
    return found


def naive(stages: int, rounds: int) -> list[Turn]:
    """Return WeiPipe-Naive: a round's forward passes, then its backward passes, then the next round."""
    up, down = range(stages), reversed(range(stages))
    ways = [("F", stage) for stage in up] + [("B", stage) for stage in down]
    return [(StagePass(kind, stage, number),) for number in range(rounds) for kind, stage in ways]  # type: ignore[arg-type]


def zero_bubble(stages: int, rounds: int) -> list[Turn]:
    """Return the zero-bubble variant: forward passes, gradients of inputs downwards, gradients of weights upwards.

    Only the last third, the gradients of weights, waits for gradients in transfer. This third needs no weights, as the
    inputs of a layer's products are kept.
    """
    up, down = range(stages), reversed(range(stages))
    ways = [("F", stage) for stage in up] + [("I", stage) for stage in down] + [("W", stage) for stage in up]
    return [(StagePass(kind, stage, number),) for number in range(rounds) for kind, stage in ways]  # type: ignore[arg-type]


def forward(stages: int, rounds: int) -> list[Turn]:
    """Return forward passes alone, for evaluation."""
    return [(StagePass("F", stage, number),) for number in range(rounds) for stage in range(stages)]


VARIANTS: dict[str, Turns] = {"weipipe": interleave, "weipipe-naive": naive, "weipipe-zb": zero_bubble}
"""Name of a WeiPipe variant in specs → function that returns the variant's turns."""


def order_of(name: str) -> Callable[[int, int, int, int], Order]:
    """Return the function of (ranks, micro_batches, chunks, cap) that returns a variant's compute actions."""
    variant = VARIANTS[name]

    def order(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
        return _computed(variant(ranks * chunks, -(-micro_batches // ranks)), ranks, micro_batches)

    return order


@lru_cache(maxsize=64)
def weipipe(name: str, ranks: int, micro_batches: int, chunks: int = 1, trained_from: int = 0) -> Schedule:
    """Return a variant's full schedule with its shifts.

    Stages before ``trained_from`` only run forward. If all stages only run forward, the schedule is for evaluation.
    Otherwise the number of micro-batches has to be a multiple of the ranks, or ``ValueError`` is raised.
    """
    stages = ranks * chunks
    if micro_batches % ranks and trained_from < stages:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of the {ranks} ranks")
    make = forward if trained_from >= stages else VARIANTS[name]
    turns = [
        tuple(one for one in turn if one.kind == "F" or one.stage >= trained_from)
        for turn in make(stages, -(-micro_batches // ranks))
    ]
    placement = tuple(owner(stage, ranks) for stage in range(stages))
    lists = with_shifts([turn for turn in turns if turn], ranks, micro_batches)
    return Schedule(name, ranks, micro_batches, chunks, placement, lists, "weights", min(trained_from, stages))


def with_shifts(turns: Sequence[Turn], ranks: int, micro_batches: int) -> Order:
    """Return each rank's list of compute actions, shifts of weights and shifts of gradients.

    The ``micro_batch`` of a shift identifies it: the turn at which it would arrive if each rank ran one turn behind the
    rank before it. A turn is preceded by the shifts of the next turn's weights, receives before sends; an owner sends
    its stage's weights to rank 0 ``ranks`` turns ahead, since an owner is at most that far behind rank 0. A backward
    pass is followed by receiving the gradients of the rank before, and then by sending the sum; gradients that return
    from the last rank are received a turn later.
    """
    behind: dict[int, dict[int, list[Action]]] = {rank: defaultdict(list) for rank in range(ranks)}
    weights, dealt = _weights(turns, ranks, micro_batches)
    gradients, homes = _gradients(turns, ranks)
    computed = [
        [
            [Action(one.kind, one.stage, one.round * ranks + rank) for one in turn]
            for turn in turns
        ]
        for rank in range(ranks)
    ]  # fmt: skip
    for rank in range(ranks):
        for at in range(-1, len(turns) + 1):
            step = behind[rank][at]
            step += dealt[rank, at] + weights[rank, at + 1]
            for action in computed[rank][at] if 0 <= at < len(turns) else ():
                if action.micro_batch < micro_batches:
                    step.append(action)
                if action.kind in ("B", "W"):
                    step += gradients[rank, at, action.stage]
            step += homes[rank, at - 1]
    return tuple(tuple(action for at in sorted(steps) for action in steps[at]) for steps in behind.values())


def trains(turns: Sequence[Turn]) -> list[tuple[int, StagePass]]:
    """Return (turn, pass) for each pass that is not ``W`` and whose stage was not in use in the turn before.

    The weights of the stage are sent for these passes.
    """
    last: dict[int, int] = {}
    found: list[tuple[int, StagePass]] = []
    for at, turn in enumerate(turns):
        for one in turn:
            if one.kind == "W":
                continue
            if last.get(one.stage, -2) < at - 1:
                found.append((at, one))
            last[one.stage] = at
    return found


Placed = defaultdict[tuple[int, int], list[Action]]
"""(Rank, turn) → shifts (transfers of weights or gradients) of this rank in this turn."""


def _weights(turns: Sequence[Turn], ranks: int, micro_batches: int) -> tuple[Placed, Placed]:
    """Return shifts of weights by the turn that needs the weights, and owners' sends to rank 0 by the turn of sending.

    Weights are sent only to ranks that have a micro-batch.
    """
    shifts: Placed = defaultdict(list)
    dealt: Placed = defaultdict(list)
    sends: Placed = defaultdict(list)
    for at, (kind, stage, number) in trains(turns):
        way = "FW" if kind == "F" else "BW"
        home = owner(stage, ranks)
        if home != 0:
            dealt[home, max(-1, at - 1 - ranks)].append(_shift("SEND", way, stage, at))
            shifts[0, at].append(_shift("RECV", way, stage, at))
        for rank in range(1, min(ranks, micro_batches - number * ranks)):
            if rank != home:
                sends[rank - 1, at].append(_shift("SEND", way, stage, at + rank))
                shifts[rank, at].append(_shift("RECV", way, stage, at + rank))
    for place, found in sends.items():
        shifts[place] += found
    return shifts, dealt


def _gradients(turns: Sequence[Turn], ranks: int) -> tuple[defaultdict[tuple[int, int, int], list[Action]], Placed]:
    """Return (rank, turn, stage) → gradient shifts after that backward pass, and later receives of sums by owners."""
    shifts: defaultdict[tuple[int, int, int], list[Action]] = defaultdict(list)
    homes: Placed = defaultdict(list)
    for at, turn in enumerate(turns):
        for kind, stage, _ in turn:
            if kind not in ("B", "W"):
                continue
            home = owner(stage, ranks)
            for rank in range(ranks):
                if rank and rank - 1 != home:
                    shifts[rank, at, stage].append(Action("RECV_G", stage, at + rank))
                if rank not in (home, ranks - 1):
                    shifts[rank, at, stage].append(Action("SEND_G", stage, at + rank + 1))
            if home != ranks - 1:
                shifts[ranks - 1, at, stage].append(Action("SEND_G", stage, at + ranks))
                homes[home, at].append(Action("RECV_G", stage, at + ranks))
    return shifts, homes


def _computed(turns: Sequence[Turn], ranks: int, micro_batches: int) -> Order:
    return tuple(
        tuple(
            Action(kind, stage, number * ranks + rank)
            for turn in turns
            for kind, stage, number in turn
            if number * ranks + rank < micro_batches
        )
        for rank in range(ranks)
    )


def _shift(end: Literal["SEND", "RECV"], way: str, stage: int, turn: int) -> Action:
    return Action(f"{end}_{way}", stage, turn)  # type: ignore[arg-type]


def volume(schedule: Schedule, weights: Sequence[float], gradients: Sequence[float]) -> tuple[float, ...]:
    """Return the amount that each rank sends in a step; ``weights`` and ``gradients`` are sizes by stage.

    The amounts have the unit of the sizes: bytes or elements. All ranks together send ``ranks - 1`` times the weights
    of each entry of :func:`trains`, and ``ranks - 1`` times the gradients of each backward pass of a round.
    """
    return tuple(
        sum(
            (gradients if action.kind == "SEND_G" else weights)[action.stage]
            for action in actions
            if action.kind in ("SEND_FW", "SEND_BW", "SEND_G")
        )
        for actions in schedule.lists
    )


GRADIENT_COPIES = 4
"""Number of stages for whose gradients a rank has room in addition to the stages it owns. One gradient is being
computed, one is in transfer, one is between these two so that a slow neighbour does not stall the rank at once,
and one was received and is to be added."""


class CopyRoom(NamedTuple):
    """Room on a rank for copies of other ranks' stages: number of copies of weights, and of gradients."""

    weights: int
    gradients: int


def room(schedule: Schedule, rank: int) -> CopyRoom:
    """Return the peak number of weight copies (held from arrival to last use) and of gradient copies on a rank."""
    actions = schedule.lists[rank]
    last: dict[int, int] = {}
    ends: defaultdict[int, int] = defaultdict(int)
    for at in reversed(range(len(actions))):
        kind, stage, _ = actions[at]
        if schedule.placement[stage] == rank or kind in ("W", "RECV_G", "SEND_G"):
            continue
        if kind in ("RECV_FW", "RECV_BW"):
            ends[last.pop(stage, at)] += 1
        else:
            last.setdefault(stage, at)
    held = most = 0
    for at, action in enumerate(actions):
        held += action.kind in ("RECV_FW", "RECV_BW")
        most = max(most, held)
        held -= ends[at]
    summed = any(action.kind in ("B", "W") for action in actions)
    return CopyRoom(most, GRADIENT_COPIES if summed else 0)

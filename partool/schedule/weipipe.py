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
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
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
    turns: list[Turn] = []
    for turn in range(stages * (rounds + 1)):
        number, place = divmod(turn, stages)
        back = (StagePass("B", stages - 1 - place, number - 1),) if number else ()
        turns.append((*back, *((StagePass("F", place, number),) if number < rounds else ())))
    return turns


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
    rank before it. All lists follow one order of passes and transfers (:class:`_Place`), in which the two ends of a
    transfer are one event. So no rank waits for ever, even if each rank waits at every action until its device has
    completed all transfers posted so far: the first event that is not complete can always complete.

    A turn is preceded by the shifts of the next turn's weights; an owner sends weights to rank 0 the earlier in its
    list the further it is behind rank 0. A backward pass is followed by receiving the gradients of the rank before; the
    sum is sent before the next pass.
    """
    passes = [(at, one) for at, turn in enumerate(turns) for one in turn]
    events = [
        *_weights(turns, ranks, micro_batches),
        *_passes(passes, ranks, micro_batches),
        *_gradients(passes, ranks),
    ]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    for _, ends in sorted(events, key=lambda event: event[0]):
        for rank, action in ends:
            lists[rank].append(action)
    return tuple(map(tuple, lists))


def trains(turns: Sequence[Turn]) -> list[tuple[int, StagePass]]:
    """Return (turn, pass) for each pass that is not ``W`` and whose stage was not in use in the turn before.

    The weights of the stage are sent for these passes.
    """
    last: dict[int, int] = {}
    starts: list[tuple[int, StagePass]] = []
    for at, turn in enumerate(turns):
        for one in turn:
            if one.kind == "W":
                continue
            if last.get(one.stage, -2) < at - 1:
                starts.append((at, one))
            last[one.stage] = at
    return starts


class _Place(NamedTuple):
    """Place in the order in which each rank starts a pass half a pass after the rank before it.

    The further behind the order supposes a rank to be, the earlier owners send weights to rank 0, and the later they
    receive sums from the last rank. Ranks that are less or further behind lose time, but do not hang. Half a pass costs
    little while a transfer takes up to a third of a forward pass (``tests/bench/ring_order.py``).
    """

    start: int
    """When the pass starts that the event belongs to, in halves of a pass."""
    rank: int
    """The rank of this pass, negated: of passes that start together, the earliest pass of the step comes first."""
    part: int
    """0 for shifts before the pass, 1 for the pass, 2 and 3 for shifts after the pass."""


Event = tuple[_Place, tuple[tuple[int, Action], ...]]
"""A pass, or a transfer with its two ends: its place in the order, and each action with its rank."""
_BEFORE, _PASS, _AFTER, _LAST = range(4)


def _place(number: int, rank: int, part: int) -> _Place:
    """Return the place of a part of a rank's pass; ``number`` counts the passes of a step, -1 is before the first."""
    return _Place(2 * number + rank, -rank, part)


def _weights(turns: Sequence[Turn], ranks: int, micro_batches: int) -> Iterator[Event]:
    """Yield the transfers of weights. Weights are sent only to ranks that have a micro-batch."""
    begins = [-1, *accumulate(map(len, turns), initial=0)]
    for at, (kind, stage, number) in trains(turns):
        way = "FW" if kind == "F" else "BW"
        home, begin = owner(stage, ranks), begins[at]
        if home != 0:
            # As early as rank 0 has room for the weights: after its last pass two turns before their use.
            yield _place(begin - 1, 0, _AFTER), _ends(way, stage, at, home, 0)
        for rank in range(1, min(ranks, micro_batches - number * ranks)):
            if rank != home:
                yield _place(begin, rank - 1, _BEFORE), _ends(way, stage, at + rank, rank - 1, rank)


def _passes(passes: Sequence[tuple[int, StagePass]], ranks: int, micro_batches: int) -> Iterator[Event]:
    for number, (_, one) in enumerate(passes):
        for rank in range(min(ranks, micro_batches - one.round * ranks)):
            action = Action(one.kind, one.stage, one.round * ranks + rank)
            yield _place(number, rank, _PASS), ((rank, action),)


def _gradients(passes: Sequence[tuple[int, StagePass]], ranks: int) -> Iterator[Event]:
    """Yield the transfers of gradients: from rank to rank, and of sums from the last rank to the owners."""
    last = ranks - 1
    for number, (at, (kind, stage, _)) in enumerate(passes):
        if kind not in ("B", "W"):
            continue
        home = owner(stage, ranks)
        for rank in range(1, ranks):
            if rank - 1 != home:
                yield _place(number, rank, _AFTER), _ends("G", stage, at + rank, rank - 1, rank)
        if home != last:
            yield _place(number, last, _LAST), _ends("G", stage, at + ranks, last, home)


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


def _ends(what: str, stage: int, number: int, sender: int, receiver: int) -> tuple[tuple[int, Action], ...]:
    """Return the two ends of a transfer, each with its rank; ``number`` identifies the transfer."""
    send, receive = (Action(f"{end}_{what}", stage, number) for end in ("SEND", "RECV"))  # type: ignore[arg-type]
    return (sender, send), (receiver, receive)


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
    copies = most = 0
    for at, action in enumerate(actions):
        copies += action.kind in ("RECV_FW", "RECV_BW")
        most = max(most, copies)
        copies -= ends[at]
    summed = any(action.kind in ("B", "W") for action in actions)
    return CopyRoom(most, GRADIENT_COPIES if summed else 0)

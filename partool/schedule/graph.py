"""Sort the compute actions of a schedule so that each follows its inputs, and find the part that repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from partool.schedule.actions import COMPUTE, Order, Schedule, peer
from partool.schedule.generators import check, generate, order, rank_of
from partool.schedule.steps import Link, Step, steps_of
from partool.strategies.schedules import SCHEDULES

_WARM = {True: 3, False: 4}
"""Number of rounds, of ``ranks`` micro-batches each, before the steps repeat. The key is True if the steps repeat after
each micro-batch, and False if the steps repeat after each round."""
_WHOLE = 20_000
"""Maximum number of compute actions up to which the lists of a searched schedule are generated in full."""
_WHOLE_ROUND = 2_000
"""The limit ``_WHOLE`` for schedules that send weights around a ring. In such a schedule, later rounds take as long as
earlier rounds, up to rounding."""


class Graph(NamedTuple):
    """Steps for ``base + growth * n`` micro-batches: ``before``, n times the repeating ``stretch``, then ``after``."""

    before: tuple[Step, ...]
    stretch: tuple[Step, ...]
    after: tuple[Step, ...]
    reach: int
    """Largest number of steps from a step back to an earlier step that the step waits for."""
    ends: tuple[int, ...]
    """Index, counted from the end, of each rank's last step and of the last message's step on each link with steps."""
    links: tuple[Link, ...]
    """Links between ranks, in the order of their columns in the durations."""


@lru_cache(maxsize=512)
def graph(name: str, ranks: int, micro_batches: int, chunks: int, cap: int = 0) -> Graph:
    """Return the graph of the whole schedule; it has no repeating part (``stretch`` is empty)."""
    if SCHEDULES[name].moves == "weights":
        return graph_of(generate(name, ranks, micro_batches, chunks, cap))
    places = [rank_of(name, stage, ranks) for stage in range(ranks * chunks)]
    links = _links(places)
    steps, last = _sorted(order(name, ranks, micro_batches, chunks, cap), places, micro_batches, links)
    return _graph(steps, last, links)


@lru_cache(maxsize=64)
def graph_of(schedule: Schedule, shared: bool = False) -> Graph:
    """Return the graph of any schedule; it has no repeating part. See :func:`partool.schedule.steps.steps_of`."""
    ordered = steps_of(schedule, shared=shared)
    last: dict[tuple[int, int], int] = {}
    for at, who in enumerate(ordered.of):
        if who is not None:
            rank, action = who
            last[rank, -1 if action.kind in COMPUTE else peer(schedule, rank, action)[0]] = at
    return _graph(ordered.steps, last.values(), ordered.links)


def _graph(steps: Sequence[Step], last: Iterable[int], links: tuple[Link, ...]) -> Graph:
    reach = max((max(before, other) for _, before, other, _ in steps), default=0)
    return Graph(tuple(steps), (), (), reach, tuple(len(steps) - index for index in last), links)


def _links(places: Sequence[int]) -> tuple[Link, ...]:
    beside = {pair for pair in pairwise(places) if pair[0] != pair[1]}
    return tuple(sorted((here, neighbour, False) for here, neighbour in beside | {pair[::-1] for pair in beside}))


def longest(name: str, ranks: int, chunks: int) -> int:
    """Return the largest number of micro-batches up to which a schedule is generated in full; 0 if a part repeats."""
    record = SCHEDULES[name]
    # Only action lists that a search finds accept a bound of memory.
    if not record.capped and record.moves == "activations":
        return 0
    each = (3 if record.split else 2) * ranks * chunks
    most = _WHOLE if record.capped else _WHOLE_ROUND
    return max(6 * ranks, most // each // ranks * ranks)


def growth(name: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Return the number of micro-batches in one repetition: 1, or ``ranks`` if only whole rounds are accepted."""
    return 1 if check(name, ranks, micro_batches + 1, chunks) is None else ranks


def base(name: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Return the smallest number of micro-batches for which the schedule has its repeating part.

    This number differs from ``micro_batches`` by a multiple of ``growth``.
    """
    by = growth(name, ranks, micro_batches, chunks)
    least = max(_WARM[by == 1] * ranks, 2)
    return min(micro_batches, least + (micro_batches - least) % by)


@lru_cache(maxsize=512)
def repeating(name: str, ranks: int, micro_batches: int, chunks: int) -> Graph | None:
    """Return the graph for ``micro_batches`` with its repeating part in ``stretch``; None if no part repeats.

    Steps are in the order of :func:`_sorted`, and each step refers to other steps relative to its own position. A
    schedule in its steady state therefore repeats equal steps, and a longer schedule repeats these steps more often.
    (GPipe has no repeating part, because a longer GPipe schedule grows in two places.)
    """
    full = graph(name, ranks, micro_batches, chunks)
    steps, by = full.before, growth(name, ranks, micro_batches, chunks)
    length = len(steps) * by // micro_batches
    best = start = 0
    best_start = 0
    for index in range(len(steps) - length):
        if steps[index] != steps[index + length]:
            start = index + 1
        elif index + 1 - start > best:
            best, best_start = index + 1 - start, start
    cut = best_start + best + length
    # Steps may look back by one repetition: from after the repeating part, or from one repetition to the one before.
    # The part must have every action of each stage equally often (GPipe's steady forward passes all look the same).
    each = Counter(column for column, *_ in steps[cut - length : cut])
    if best < length or full.reach > cut - best_start or set(each.values()) != {by} or len(each) * by != length:
        return None
    return Graph(steps[:cut], steps[cut - length : cut], steps[cut:], full.reach, full.ends, full.links)


def _sorted(
    lists: Order, places: Sequence[int], micro_batches: int, links: tuple[Link, ...]
) -> tuple[list[Step], list[int]]:
    """Return the steps of the action lists in a sorted order, and the index of each rank's last step.

    Steps are sorted by the time at which they would start if each step took one unit of time. Actions are numbered
    (kind by kind, stage by stage) for speed, as a search builds dozens of graphs of 10,000 actions. Inputs from the
    same rank need no entry, because they stand earlier in the rank's list.
    """
    stages = len(places)
    started = _started(_numbered(lists, stages, micro_batches), stages, micro_batches)
    column = {link[:2]: 4 * stages + at for at, link in enumerate(links)}
    index = [0] * (4 * stages * micro_batches)
    steps: list[Step] = []
    last = [-1] * len(lists)
    for here, (_, rank, number, need) in enumerate(sorted(started)):
        previous = last[rank]
        other = under_way = 0
        if need >= 0 and (sender := places[need // micro_batches % stages]) != rank:
            other, under_way = here - index[need], column[sender, rank]
        steps.append((number // micro_batches, here - previous if previous >= 0 else 0, other, under_way))
        index[number] = last[rank] = here
    return steps, last


def _numbered(lists: Order, stages: int, micro_batches: int) -> list[list[int]]:
    first = {kind: at * stages * micro_batches for at, kind in enumerate("FBIW")}
    return [[first[kind] + stage * micro_batches + batch for kind, stage, batch in actions] for actions in lists]


def _started(lists: list[list[int]], stages: int, micro_batches: int) -> list[tuple[int, int, int, int]]:
    """Return (start time, rank, action, input from the neighbouring stage or -1) of each action.

    Start times count actions, each of which takes one unit. The entries are in the order in which rounds over the ranks
    find the actions.
    """
    each = stages * micro_batches
    stop = [0] * (4 * each)
    started: list[tuple[int, int, int, int]] = []
    at, free = [0] * len(lists), [0] * len(lists)
    total = sum(len(actions) for actions in lists)
    while len(started) < total:
        before = len(started)
        for rank, actions in enumerate(lists):
            position, now, size = at[rank], free[rank], len(actions)
            while position < size:
                number = actions[position]
                need = _neighbour(number, each, micro_batches)
                if need >= 0:
                    made = stop[need]
                    if not made:
                        break
                    now = max(now, made)
                started.append((now, rank, number, need))
                now += 1
                stop[number] = now
                position += 1
            at[rank], free[rank] = position, now
        if len(started) == before:
            raise ValueError(f"the schedule cannot go on: its {len(lists)} ranks wait for each other")
    return started


def _neighbour(number: int, each: int, micro_batches: int) -> int:
    """Return the number of the neighbouring stage's action that makes the input of ``number``; -1 if none does."""
    kind, place = divmod(number, each)
    if kind == 0:
        return number - micro_batches if place >= micro_batches else -1
    return number + micro_batches if kind < 3 and place + micro_batches < each else -1

"""A schedule's compute actions in an order in which inputs come first, and the stretch of it that repeats."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from partool.schedule.actions import Order
from partool.schedule.generators import SCHEDULES, check, order

_WARM = {True: 3, False: 4}
"""Rounds of ``ranks`` micro-batches in which the repeating stretch shows: where it is one micro-batch; a round."""

Step = tuple[int, int, int]
"""Column of the duration; how many steps back are the action before on the rank and the input from the neighbouring
stage (0: none). Inputs made on the same rank need no entry: they stand earlier in its list."""


class Graph(NamedTuple):
    """``before``, then ``stretch`` any number of times, then ``after``. Micro-batches: ``base + growth * times``."""

    before: tuple[Step, ...]
    stretch: tuple[Step, ...]
    after: tuple[Step, ...]
    reach: int
    """The furthest that any step looks back."""
    ends: tuple[int, ...]
    """The last action of each rank, counted from the end."""


@lru_cache(maxsize=512)
def graph(name: str, ranks: int, micro_batches: int, chunks: int) -> Graph:
    """Return the whole graph, with no repeating stretch."""
    steps, last = _sorted(name, ranks, micro_batches, chunks)
    reach = max((max(before, other) for _, before, other in steps), default=0)
    return Graph(tuple(steps), (), (), reach, tuple(len(steps) - index for index in last))


def growth(name: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Return by how many micro-batches a schedule may grow: one, or a round of all ranks."""
    return 1 if check(name, ranks, micro_batches + 1, chunks) is None else ranks


def base(name: str, ranks: int, micro_batches: int, chunks: int) -> int:
    """Return the least micro-batches, some number of growths below those asked for, at which the stretch shows."""
    by = growth(name, ranks, micro_batches, chunks)
    least = max(_WARM[by == 1] * ranks, 2)
    return min(micro_batches, least + (micro_batches - least) % by)


@lru_cache(maxsize=512)
def repeating(name: str, ranks: int, micro_batches: int, chunks: int) -> Graph | None:
    """Return the graph of that many micro-batches, cut around the stretch that one growth repeats; None if none does.

    In the order that :func:`_sorted` makes, each step is written relative to its place; a schedule in its steady state
    is then the same steps over and over, and a longer one has more of them. (GPipe has no such stretch: it grows in two
    places.)
    """
    whole = graph(name, ranks, micro_batches, chunks)
    steps, by = whole.before, growth(name, ranks, micro_batches, chunks)
    length = len(steps) * by // micro_batches
    best = start = 0
    best_start = 0
    for index in range(len(steps) - length):
        if steps[index] != steps[index + length]:
            start = index + 1
        elif index + 1 - start > best:
            best, best_start = index + 1 - start, start
    cut = best_start + best + length
    # What follows may look back into the stretch, and one stretch into the one before it, but no further.
    # Each stage's every action must be in it alike (all of GPipe's steady forward passes look the same).
    each = Counter(column for column, _, _ in steps[cut - length : cut])
    if best < length or whole.reach > cut - best_start or set(each.values()) != {by} or len(each) * by != length:
        return None
    return Graph(steps[:cut], steps[cut - length : cut], steps[cut:], whole.reach, whole.ends)


def _sorted(name: str, ranks: int, micro_batches: int, chunks: int) -> tuple[list[Step], list[int]]:
    """Return the steps, sorted by their starts if each takes one unit, and the index of each rank's last one.

    Actions are numbers here (kind by kind, stage by stage): a search builds graphs of 10,000 actions by the dozen.
    """
    stages = ranks * chunks
    lists = _numbered(order(name, ranks, micro_batches, chunks), stages, micro_batches)
    found = _started(name, lists, stages, micro_batches)
    rank_of = [SCHEDULES[name].rank_of(stage, ranks) for stage in range(stages)]
    index = [0] * (4 * stages * micro_batches)
    steps: list[Step] = []
    last = [-1] * ranks
    for here, (_, rank, number, need) in enumerate(sorted(found)):
        previous = last[rank]
        away = need >= 0 and rank_of[need // micro_batches % stages] != rank
        other = here - index[need] if away else 0
        steps.append((number // micro_batches, here - previous if previous >= 0 else 0, other))
        index[number] = last[rank] = here
    return steps, last


def _numbered(lists: Order, stages: int, micro_batches: int) -> list[list[int]]:
    first = {kind: at * stages * micro_batches for at, kind in enumerate("FBIW")}
    return [[first[kind] + stage * micro_batches + batch for kind, stage, batch in actions] for actions in lists]


def _started(name: str, lists: list[list[int]], stages: int, micro_batches: int) -> list[tuple[int, int, int, int]]:
    """Return (start in units, rank, action, its input from the neighbouring stage or -1), ranks acting in turn."""
    each = stages * micro_batches
    stop = [0] * (4 * each)
    found: list[tuple[int, int, int, int]] = []
    at, free = [0] * len(lists), [0] * len(lists)
    left = sum(len(actions) for actions in lists)
    while len(found) < left:
        before = len(found)
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
                found.append((now, rank, number, need))
                now += 1
                stop[number] = now
                position += 1
            at[rank], free[rank] = position, now
        if len(found) == before:
            raise ValueError(f"{name} cannot go on: its {len(lists)} ranks wait for each other")
    return found


def _neighbour(number: int, each: int, micro_batches: int) -> int:
    """Return what an action needs from the stage beside its own, -1 if nothing."""
    kind, place = divmod(number, each)
    if kind == 0:
        return number - micro_batches if place >= micro_batches else -1
    return number + micro_batches if kind < 3 and place + micro_batches < each else -1

"""A schedule's compute actions in an order in which inputs come first, and the stretch of it that repeats."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from partool.schedule.actions import Action
from partool.schedule.generators import SCHEDULES, Order, check, order

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
    """Return the steps, sorted by their starts if each takes one unit, and the index of each rank's last one."""
    lists, stages = order(name, ranks, micro_batches, chunks), ranks * chunks
    column = {"F": 0, "B": stages, "I": 2 * stages, "W": 3 * stages}
    found = _started(name, lists, stages)
    rank_of = SCHEDULES[name].rank_of
    index: dict[Action, int] = {}
    steps: list[Step] = []
    last = [-1] * ranks
    for here, (_, rank, action, need) in enumerate(sorted(found, key=lambda one: one[:2])):
        previous = last[rank]
        other = here - index[need] if need is not None and rank_of(need.stage, ranks) != rank else 0
        steps.append((column[action.kind] + action.stage, here - previous if previous >= 0 else 0, other))
        index[action] = last[rank] = here
    return steps, last


def _started(name: str, lists: Order, stages: int) -> list[tuple[int, int, Action, Action | None]]:
    """Return (start in units, rank, action, its input from the neighbouring stage), ranks acting in turn."""
    stop: dict[Action, int] = {}
    found: list[tuple[int, int, Action, Action | None]] = []
    at, free = [0] * len(lists), [0] * len(lists)
    left = sum(len(actions) for actions in lists)
    while len(found) < left:
        before = len(found)
        for rank, actions in enumerate(lists):
            position, now, size = at[rank], free[rank], len(actions)
            while position < size:
                action = actions[position]
                if need := _neighbour(action, stages):
                    made = stop.get(need)
                    if made is None:
                        break
                    now = max(now, made)
                found.append((now, rank, action, need))
                now += 1
                stop[action] = now
                position += 1
            at[rank], free[rank] = position, now
        if len(found) == before:
            raise ValueError(f"{name} cannot go on: its {len(lists)} ranks wait for each other")
    return found


def _neighbour(action: Action, stages: int) -> Action | None:
    """Return what an action needs from the stage beside its own."""
    kind, stage, batch = action
    if kind == "F":
        return Action("F", stage - 1, batch) if stage else None
    return Action(kind, stage + 1, batch) if kind != "W" and stage + 1 < stages else None

"""How long a schedule takes, fast: its graph is sorted once and serves every set of stage times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from partool.schedule.generators import order
from partool.schedule.simulate import _peak

_WARM = 4
"""Rounds of ``ranks`` micro-batches after which a schedule repeats itself but for a constant."""
_LEAST = 32
"""Of these micro-batches: small pipelines are cheap to follow for longer."""
_ROUNDS = 3
"""Further rounds over which the constant is measured."""


class _Graph(NamedTuple):
    """Compute actions in an order in which inputs come first."""

    steps: tuple[tuple[int, int, int, int, bool], ...]
    """Column of the duration, index of the action before on the rank, and of the two inputs (the second from a
    neighbour, with whether it travels); an index of -1 is the start."""
    ends: tuple[int, ...]
    """The last action of each rank."""


def makespan(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int,
    *,
    forward_s: Any,
    backward_s: Any,
    weight_s: Any,
    send_s: Any,
) -> Any:
    """Return the seconds from the first to the last action: a number, or an array with one entry per case.

    Times are arrays [stages] or [cases, stages], the weights' half part of the backward pass; ``send_s`` is a number or
    [cases]. Beyond a warm-up the schedule repeats, and longer ones are extrapolated from their measured growth per
    round; against the whole simulation the result is within 0.5 %.
    """
    durations = [np.asarray(part, dtype=float) for part in (forward_s, backward_s, weight_s)]
    durations.insert(2, durations[1] - durations[2])
    short = max(_WARM * ranks * (2 if name == "interleaved" else 1), _LEAST // ranks * ranks)
    if micro_batches <= short + _ROUNDS * ranks:
        return _evaluate(_graph(name, ranks, micro_batches, chunks), durations, send_s)
    rest = (micro_batches - short) % ranks
    first = short + rest
    start = _evaluate(_graph(name, ranks, first, chunks), durations, send_s)
    later = _evaluate(_graph(name, ranks, first + _ROUNDS * ranks, chunks), durations, send_s)
    return later + (later - start) * (micro_batches - first - _ROUNDS * ranks) / (_ROUNDS * ranks)


@lru_cache(maxsize=4096)
def in_flight(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the most activations that each rank holds at once, in micro-batches of one stage, from the lists."""
    if name == "gpipe":
        return (micro_batches * chunks,) * ranks
    enough = 4 * ranks
    count = micro_batches if micro_batches <= enough else enough + (micro_batches - enough) % ranks
    return tuple(_peak(actions) for actions in order(name, ranks, count, chunks))


_COLUMN = {"F": 0, "B": 1, "I": 2, "W": 3}


@lru_cache(maxsize=256)
def _graph(name: str, ranks: int, micro_batches: int, chunks: int) -> _Graph:
    """Sort the actions so that what each needs (as :func:`partool.schedule.simulate.inputs` says) comes before it.

    Actions are numbers here, kind by kind, stage by stage: a search builds graphs of 10,000 actions by the dozen.
    """
    lists = order(name, ranks, micro_batches, chunks)
    stages = ranks * chunks
    kind = stages * micro_batches
    queues = [[_COLUMN[action.kind] * kind + action.stage * micro_batches + action.micro_batch for action in actions]
              for actions in lists]  # fmt: skip
    index = [-1] * (4 * kind)
    steps: list[tuple[int, int, int, int, bool]] = []
    at, last = [0] * ranks, [-1] * ranks
    left = sum(map(len, queues))
    while left:
        before = left
        for rank, queue in enumerate(queues):
            position, latest = at[rank], last[rank]
            while position < len(queue):
                number = queue[position]
                own, other = _needs(number, kind, micro_batches)
                if (own >= 0 and index[own] < 0) or (other >= 0 and index[other] < 0):
                    break
                found = (index[own] if own >= 0 else -1, index[other] if other >= 0 else -1)
                steps.append((number // micro_batches, latest, *found, ranks > 1))
                index[number] = latest = len(steps) - 1
                position += 1
            left -= position - at[rank]
            at[rank], last[rank] = position, latest
        if left == before:
            raise ValueError(f"{name} with {ranks} ranks and {micro_batches} micro-batches cannot go on")
    return _Graph(tuple(steps), tuple(last))


def _needs(number: int, kind: int, micro_batches: int) -> tuple[int, int]:
    """Return the numbers of the actions that one needs on its own stage and from the neighbour; -1 for none."""
    which = number // kind
    if which == 0:
        return -1, number - micro_batches if number >= micro_batches else -1
    if which == 3:
        return number - kind, -1
    place = number - which * kind
    return place, number + micro_batches if place + micro_batches < kind else -1


def _evaluate(graph: _Graph, durations: Sequence[Any], send_s: Any) -> Any:
    if all(part.ndim == 1 for part in durations) and np.ndim(send_s) == 0:
        flat = [float(value) for part in durations for value in part]
        return _one(graph, flat, float(send_s))
    cases = max(part.shape[0] if part.ndim == 2 else 1 for part in durations)
    cases = max(cases, np.size(send_s))
    wide = [np.broadcast_to(part, (cases, part.shape[-1])) for part in durations]
    return _many(graph, np.concatenate(wide, axis=1).T, np.broadcast_to(np.asarray(send_s, dtype=float), (cases,)))


def _one(graph: _Graph, durations: list[float], send_s: float) -> float:
    stop: list[float] = []
    for column, before, own, other, away in graph.steps:
        start = stop[before] if before >= 0 else 0.0
        if own >= 0:
            start = max(start, stop[own])
        if other >= 0:
            arrives = stop[other] + send_s if away else stop[other]
            start = max(start, arrives)
        stop.append(start + durations[column])
    return max(stop[end] for end in graph.ends)


def _many(graph: _Graph, durations: Any, send_s: Any) -> Any:
    cases = durations.shape[1]
    stop = np.zeros((len(graph.steps) + 1, cases))  # The last row is the start.
    for step, (column, before, own, other, away) in enumerate(graph.steps):
        start = stop[before]
        if own >= 0:
            start = np.maximum(start, stop[own])
        if other >= 0:
            start = np.maximum(start, stop[other] + send_s if away else stop[other])
        np.add(start, durations[column], out=stop[step])
    return stop[list(graph.ends)].max(axis=0)

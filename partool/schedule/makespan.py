"""How long a schedule takes, fast: its graph is sorted once and serves every set of stage times.

The stop times of a graph are a monotone function of earlier ones that passes on any constant added to all of them (it
is linear in the (max, +) algebra; Baccelli et al., Synchronization and Linearity, 1992). So if one repetition of the
steady stretch adds between ``low`` and ``high`` to all of them, so does each later one.
That bounds the error of stopping early, and the walk goes on until the bound is nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from partool.schedule.actions import Schedule
from partool.schedule.generators import order
from partool.schedule.graph import Graph, Step, base, graph, growth, repeating
from partool.schedule.simulate import StageTimes, peak_held, simulate

_EXACT = 1e-12
"""Relative error that counts as none."""
_STEPS = 200_000
"""Actions after which the walk through the steady stretch stops although the bound is not there yet."""
_FEW = 5
"""Cases up to which one after the other is quicker than numpy over all: measured about 4 for 2 ranks, 10 for 8."""


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
    input_s: Any = None,
) -> Any:
    """Return the seconds from the first to the last action: a number, or an array with one entry per case.

    Times are arrays [stages] or [cases, stages]: of the forward pass, of the whole backward pass, and of its two halves
    (``input_s`` None: the rest of the whole); ``send_s`` is a number or [cases]. The result is that of
    :func:`partool.schedule.simulate`: to rounding, unless more than 200,000 actions pass before the schedule is steady;
    what is left of such a schedule is taken at its latest pace (0.7 % off at worst with that limit set to 1,000).
    """
    durations = [np.asarray(part, dtype=float) for part in (forward_s, backward_s, weight_s)]
    durations.insert(2, durations[1] - durations[2] if input_s is None else np.asarray(input_s, dtype=float))
    first = base(name, ranks, micro_batches, chunks)
    by = growth(name, ranks, micro_batches, chunks)
    times = (micro_batches - first) // by
    if times < 3:
        return _evaluate(graph(name, ranks, micro_batches, chunks), 0, durations, send_s)
    if (short := repeating(name, ranks, first, chunks)) is not None:
        return _evaluate(short, times, durations, send_s)
    # No single stretch repeats: GPipe, whose two phases are flow lines, exactly linear from the first micro-batch on.
    start = _evaluate(graph(name, ranks, first, chunks), 0, durations, send_s)
    later = _evaluate(graph(name, ranks, first + by, chunks), 0, durations, send_s)
    return later + (later - start) * (times - 1)


@lru_cache(maxsize=4096)
def in_flight(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the most activations that each rank holds at once, in micro-batches of one stage, from the lists.

    Held from the forward pass until nothing reads them: the backward pass, or the weights' half of it. Beyond four
    rounds of micro-batches they stay the same, or (GPipe) grow by as much with each more.
    """
    by, enough = growth(name, ranks, micro_batches, chunks), 4 * ranks
    if micro_batches <= enough + 2 * by:
        return tuple(peak_held(actions) for actions in order(name, ranks, micro_batches, chunks))
    first = enough + (micro_batches - enough) % by
    start, later = (in_flight(name, ranks, count, chunks) for count in (first, first + by))
    times = (micro_batches - first) // by
    return tuple(one + (two - one) * times for one, two in zip(start, later, strict=True))


def span_s(schedule: Schedule, times: StageTimes) -> float:
    """Return the seconds from the first to the last action of any schedule, also of a list that has no generator.

    Raises ``ValueError`` where actions wait for each other in a circle.
    """
    return simulate(schedule, times).makespan_s


def _evaluate(steps: Graph, times: int, durations: list[Any], send_s: Any) -> Any:
    if all(part.ndim == 1 for part in durations) and np.ndim(send_s) == 0:
        return _follow(steps, times, np.concatenate(durations).tolist(), float(send_s))
    cases = max([np.size(send_s), *(part.shape[0] for part in durations if part.ndim == 2)])
    wide = np.concatenate([np.broadcast_to(part, (cases, part.shape[-1])) for part in durations], axis=1)
    send = np.broadcast_to(np.asarray(send_s, dtype=float), (cases,))
    if cases <= _FEW:
        return np.array([_follow(steps, times, wide[case].tolist(), float(send[case])) for case in range(cases)])
    return _follow(steps, times, np.ascontiguousarray(wide.T), send)


def _follow(steps: Graph, times: int, durations: Any, send_s: Any) -> Any:
    """Return the latest stop of a graph with ``times`` more stretches; durations [columns] or [columns, cases]."""
    walk = _walk if isinstance(durations, list) else _walk_cases
    stop: list[Any] = []
    walk(stop, steps.before, durations, send_s)
    extra: Any = 0.0
    left, most, pause = times, _STEPS, 2
    size, reach = len(steps.stretch), steps.reach
    while left:
        turns = min(pause, left)
        for _ in range(turns):
            walk(stop, steps.stretch, durations, send_s)
        left, most, pause = left - turns, most - turns * size, pause + pause // 2
        grown = np.array(stop[-reach:]) - np.array(stop[-reach - size : -size])
        low, high = grown.min(axis=0), grown.max(axis=0)
        if np.all((high - low) * left <= _EXACT * (stop[-1] + high * left)):
            extra, left = 0.5 * (low + high) * left, 0
        elif most <= 0:
            half = len(stop) // (2 * size) * size
            extra, left = (stop[-1] - stop[-1 - half]) * (size / half * left), 0
    walk(stop, steps.after, durations, send_s)
    return np.max([stop[-end] for end in steps.ends], axis=0) + extra


def _walk(stop: list[float], steps: tuple[Step, ...], durations: list[float], send_s: float) -> None:
    """Append the stop time of each step; the first on its rank starts at 0."""
    add = stop.append
    for column, before, other in steps:
        start = stop[-before] if before else 0.0
        if other:
            arrives = stop[-other] + send_s
            if arrives > start:  # noqa: PLR1730 - max() takes as long as the rest of the loop.
                start = arrives
        add(start + durations[column])


def _walk_cases(stop: list[Any], steps: tuple[Step, ...], durations: Any, send_s: Any) -> None:
    """Append the stop times [cases] of each step."""
    for column, before, other in steps:
        if other:
            start = stop[-other] + send_s
            if before:
                np.maximum(start, stop[-before], out=start)
            start += durations[column]
            stop.append(start)
        else:
            stop.append(stop[-before] + durations[column] if before else durations[column].copy())

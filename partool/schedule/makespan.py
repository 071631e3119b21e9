"""Compute the duration of a schedule quickly: the schedule's graph is sorted once and used for all stage times.

The stop times of a graph are a monotone function of earlier stop times; a constant added to all earlier times is added
to the result (it is linear in the (max, +) algebra; Baccelli et al., Synchronization and Linearity, 1992). So if one
repetition of the repeating part adds between ``low`` and ``high`` to all stop times, each later repetition also adds
between ``low`` and ``high``. These limits bound the error of stopping early, and the walk continues until the bound is
negligible.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

from partool.schedule.actions import Schedule
from partool.schedule.generators import order
from partool.schedule.graph import Graph, base, graph, graph_of, growth, longest, repeating
from partool.schedule.simulate import StageTimes, peak_held
from partool.schedule.steps import Step, link_times
from partool.strategies.schedules import SCHEDULES

_EXACT = 1e-12
"""Relative error that counts as zero."""
_STEPS = 200_000
"""Number of actions after which the walk through repetitions stops even if the bound is not yet negligible."""
_TOGETHER = 1024
"""Number of cases that numpy processes at once; the times of so few cases stay in the processor's cache."""
_FEW = 5
"""Maximum number of cases for which a loop beats numpy over all cases: measured about 4 for 2 ranks, 10 for 8 ranks."""


def makespan(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int,
    cap: int = 0,
    *,
    forward_s: Any,
    backward_s: Any,
    weight_s: Any,
    send_s: Any,
    input_s: Any = None,
    gradient_send_s: Any = None,
) -> Any:
    """Return the seconds from the first to the last action: a number, or an array with an entry per case.

    Times are arrays [stages] or [cases, stages]: of the forward pass, of the whole backward pass, and of its two parts,
    gradients of inputs and of weights (without ``input_s``, the whole backward pass minus ``weight_s``). ``send_s`` is
    a number or [cases], or a mapping from ordered pairs of ranks to such values; ``gradient_send_s`` has this form too,
    for gradients sent around a ring (None means the time of the weights).

    The result equals that of :func:`partool.schedule.simulate` to rounding, unless more than 200,000 actions pass
    before the schedule is steady; the rest of such a schedule is extrapolated at its latest pace (0.7 % off at worst
    with that limit set to 1,000). Searched action lists are evaluated in full up to about 20,000 actions, schedules
    that send weights around a ring up to 2,000; the rest of longer lists is extrapolated at the pace of their second
    half (with that limit set to 4,000, Hanayo was 0.5 % off at worst, ZB-V and schedules that send weights not at all).
    """
    durations = [np.asarray(part, dtype=float) for part in (forward_s, backward_s, weight_s)]
    durations.insert(2, durations[1] - durations[2] if input_s is None else np.asarray(input_s, dtype=float))
    sends = send_s, gradient_send_s

    def full_span_s(count: int) -> Any:
        return _evaluate(graph(name, ranks, count, chunks, cap), 0, durations, sends)

    if most := longest(name, ranks, chunks):
        if micro_batches <= most:
            return full_span_s(micro_batches)
        later, earlier = _shorter(micro_batches, ranks, most)
        stop_s = full_span_s(later)
        return stop_s + (stop_s - full_span_s(earlier)) * ((micro_batches - later) / (later - earlier))
    first = base(name, ranks, micro_batches, chunks)
    by = growth(name, ranks, micro_batches, chunks)
    times = (micro_batches - first) // by
    if times < 3:
        return full_span_s(micro_batches)
    if (short := repeating(name, ranks, first, chunks)) is not None:
        return _evaluate(short, times, durations, sends)
    # Only GPipe has no single repeating part; its two phases are flow lines, exactly linear from the first batch on.
    start, later_s = full_span_s(first), full_span_s(first + by)
    return later_s + (later_s - start) * (times - 1)


def followed(name: str, ranks: int, micro_batches: int, chunks: int) -> bool:
    """Return True if :func:`makespan` follows all actions of a schedule, however long it takes to become steady."""
    if most := longest(name, ranks, chunks):
        return micro_batches <= most
    return (3 if SCHEDULES[name].split else 2) * ranks * chunks * micro_batches <= _STEPS


@lru_cache(maxsize=4096)
def in_flight(name: str, ranks: int, micro_batches: int, chunks: int = 1, cap: int = 0) -> tuple[int, ...]:
    """Return the peak number of activations on each rank, in micro-batches of one stage, from the action lists.

    Activations are held from the forward pass until nothing reads them: the backward pass, or its weight gradients if
    it is split. Beyond four rounds of micro-batches the number of activations stays the same, or (GPipe) grows by the
    same amount with each further micro-batch; for searched lists beyond about 20,000 actions, it is assumed to grow as
    in their second half.
    """
    most = longest(name, ranks, chunks)
    by, enough = growth(name, ranks, micro_batches, chunks), 4 * ranks
    if micro_batches <= (most or enough + 2 * by):
        lists = order(name, ranks, micro_batches, chunks, cap)
        return tuple(peak_held(actions) for actions in lists)
    later, earlier = _shorter(micro_batches, ranks, most) if most else (enough + (micro_batches - enough) % by + by, 0)
    earlier = earlier or later - by
    start, stop = (in_flight(name, ranks, count, chunks, cap) for count in (earlier, later))
    times = (micro_batches - later) / (later - earlier)
    return tuple(two + max(0, ceil((two - one) * times)) for one, two in zip(start, stop, strict=True))


@lru_cache(maxsize=1024)
def layers_in_flight(sizes: tuple[str, int, int, int, int], layers: tuple[int, ...]) -> tuple[float, ...]:
    """Return, for each rank, the layers per activation when most layers are held; ``layers`` are those of each stage.

    ``sizes`` are the arguments of :func:`in_flight`.
    Stages of a rank whose numbers of layers differ do not have equal numbers of activations in flight. What repeats
    does not change the number; so only a few rounds of micro-batches are looked at.
    """
    name, ranks, micro_batches, chunks, cap = sizes
    by, enough = growth(name, ranks, micro_batches, chunks), 4 * ranks
    few = micro_batches if micro_batches <= enough else enough + (micro_batches - enough) % by
    lists = order(name, ranks, few, chunks, cap)
    return tuple(peak_held(actions, layers) / max(1, peak_held(actions)) for actions in lists)


def _shorter(micro_batches: int, ranks: int, most: int) -> tuple[int, int]:
    """Return two numbers of micro-batches, at most ``most`` and congruent to ``micro_batches`` modulo ``ranks``."""
    later = most - (most - micro_batches) % ranks
    return later, later - max(1, most // (2 * ranks)) * ranks


def span_s(schedule: Schedule, times: StageTimes) -> float:
    """Return the seconds from the first to the last action of any schedule, even if no generator made it.

    Raises ``ValueError`` where actions wait for each other in a cycle.
    """
    schedule_graph = graph_of(schedule, times.shared_links)
    return float(_follow(schedule_graph, 0, times.columns(schedule_graph.links)))


def _evaluate(steps: Graph, times: int, durations: list[Any], sends: tuple[Any, Any]) -> Any:
    under_way = [np.asarray(part, dtype=float) for part in link_times(*sends, steps.links)]
    if all(part.ndim == 1 for part in durations) and all(part.ndim == 0 for part in under_way):
        return _follow(steps, times, [*np.concatenate(durations).tolist(), *map(float, under_way), 0.0])
    cases = max([*(part.size for part in under_way), *(part.shape[0] for part in durations if part.ndim == 2)])
    rows = [np.broadcast_to(part, (cases, part.shape[-1])).T for part in durations]
    wide = np.concatenate([*rows, *(np.broadcast_to(part, (1, cases)) for part in under_way), np.zeros((1, cases))])
    if cases <= _FEW:
        return np.array([_follow(steps, times, wide[:, case].tolist()) for case in range(cases)])
    parts = [np.ascontiguousarray(wide[:, at : at + _TOGETHER]) for at in range(0, cases, _TOGETHER)]
    return np.concatenate([_follow(steps, times, part) for part in parts])


def _follow(steps: Graph, times: int, durations: Any) -> Any:
    """Return the latest stop time after ``times`` repetitions; ``durations`` is [columns] or [columns, cases]."""
    walk = _walk if isinstance(durations, list) else _walk_cases
    stop: list[Any] = []
    walk(stop, steps.before, durations)
    extra: Any = 0.0
    remaining, most, pause = times, _STEPS, 2
    size, reach = len(steps.stretch), steps.reach
    while remaining:
        turns = min(pause, remaining)
        for _ in range(turns):
            walk(stop, steps.stretch, durations)
        remaining, most, pause = remaining - turns, most - turns * size, pause + pause // 2
        grown = np.array(stop[-reach:]) - np.array(stop[-reach - size : -size])
        low, high = grown.min(axis=0), grown.max(axis=0)
        if np.all((high - low) * remaining <= _EXACT * (stop[-1] + high * remaining)):
            extra, remaining = 0.5 * (low + high) * remaining, 0
        elif most <= 0:
            half = len(stop) // (2 * size) * size
            extra, remaining = (stop[-1] - stop[-1 - half]) * (size / half * remaining), 0
    walk(stop, steps.after, durations)
    return np.max([stop[-end] for end in steps.ends], axis=0) + extra


def _walk(stop: list[float], steps: tuple[Step, ...], durations: list[float]) -> None:
    """Append the stop time of each step to ``stop``; the first step of a rank starts at 0."""
    add = stop.append
    for column, before, other, under_way in steps:
        start = stop[-before] if before else 0.0
        if other:
            arrives = stop[-other] + durations[under_way]
            if arrives > start:  # noqa: PLR1730 - max() takes as long as the rest of the loop.
                start = arrives
        add(start + durations[column])


def _walk_cases(stop: list[Any], steps: tuple[Step, ...], durations: Any) -> None:
    """Append an array [cases] with the stop times of each step to ``stop``."""
    for column, before, other, under_way in steps:
        if other:
            start = stop[-other] + durations[under_way]
            if before:
                np.maximum(start, stop[-before], out=start)
            start += durations[column]
            stop.append(start)
        else:
            stop.append(stop[-before] + durations[column] if before else durations[column].copy())

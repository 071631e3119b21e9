"""Contiguous splits of layers over pipeline stages that minimise the slowest stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

_CLOSE = 1.0 + 1e-9


def balance(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, grain: float = 0.0
) -> tuple[tuple[int, int], ...]:
    """Return the first and the one-past-last layer of each stage; every stage has at least one layer.

    ``first`` and ``last`` are the additional costs of stage 0 (embedding) and of the last stage (head). The largest
    cost of a stage is as small as any contiguous split allows. If several splits reach this minimum, the split whose
    stages have the most even numbers of layers is taken. ``grain``: a number of which all costs are multiples, which
    shortens the search. Raises ``ValueError`` if there are fewer layers than stages.
    """
    if stages < 1 or len(costs) < stages:
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages")
    return _balance(tuple(costs), stages, first, last, grain)


@lru_cache(maxsize=4096)
def _balance(
    costs: tuple[float, ...], stages: int, first: float, last: float, grain: float
) -> tuple[tuple[int, int], ...]:
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    total = sums[-1] + first + last
    low = max(total / stages, *costs) * (1.0 - 1e-12)
    # Stages that take layers up to a layer more than the mean suffice, unless one layer is all that is left for some.
    high = total / stages + max(costs) + max(first, last)
    ends = _fill(sums, extra, high)
    if ends is None:
        ends, high = _fill(sums, extra, total), total
    for _ in range(60):
        if high - low <= max(1e-9 * high, grain * (1.0 - 1e-6)):
            break
        middle = 0.5 * (low + high)
        filled = _fill(sums, extra, middle)
        if filled is None:
            low = middle
        else:
            ends, high = filled, min(middle, _largest(sums, extra, filled))
    assert ends is not None
    return _evened(sums, extra, _largest(sums, extra, ends) * _CLOSE)


def _fill(sums: list[float], extra: list[float], limit: float) -> list[int] | None:
    """Return the end of each stage if each stage takes as many layers as ``limit`` allows.

    Returns None if a stage would get no layer, or if layers are left over.
    """
    layers, stages = len(sums) - 1, len(extra)
    ends: list[int] = []
    start = 0
    for stage in range(stages):
        end = _reach(sums, start, limit - extra[stage], layers - (stages - stage - 1))
        if end == start:
            return None
        ends.append(end)
        start = end
    return ends if start == layers else None


def _reach(sums: list[float], start: int, room: float, most: int) -> int:
    """Return the end of a stage that starts at layer ``start`` and costs at most ``room``."""
    end = bisect_right(sums, sums[start] + room * _CLOSE) - 1
    return max(start, min(end, most))


def _largest(sums: list[float], extra: list[float], ends: list[int]) -> float:
    starts = [0, *ends[:-1]]
    return max(sums[end] - sums[start] + more for start, end, more in zip(starts, ends, extra, strict=True))


def _evened(sums: list[float], extra: list[float], limit: float) -> tuple[tuple[int, int], ...]:
    """Return a split in which no stage costs more than ``limit`` and stages have nearly equal numbers of layers.

    The end of each stage is chosen in turn, beginning with the first stage.
    """
    layers, stages = len(sums) - 1, len(extra)
    # Earliest start of each stage such that it and the later stages can hold all remaining layers.
    earliest = [0] * stages + [layers]
    for stage in range(stages - 1, 0, -1):
        start = earliest[stage + 1]
        while start > stage and sums[earliest[stage + 1]] - sums[start - 1] <= (limit - extra[stage]) * _CLOSE:
            start -= 1
        earliest[stage] = start
    bounds = []
    start = 0
    for stage in range(stages):
        most = _reach(sums, start, limit - extra[stage], layers - (stages - stage - 1))
        wanted = start + -(-(layers - start) // (stages - stage))
        end = max(min(wanted, most), earliest[stage + 1], start + 1)
        bounds.append((start, end))
        start = end
    return tuple(bounds)

"""Find which keys of other ranks a rank's queries see under causal attention, with or without a window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from partool.layout.sequence import Spans


def needed(queries: Spans, keys: Spans, window: int | None = None) -> Spans:
    """Return the parts of the spans ``keys`` that at least one token of ``queries`` sees, in the order of ``keys``.

    Spans are defined in :mod:`partool.layout.sequence`. A query sees the last ``window`` tokens, including its own
    token.
    """
    visible = []
    for low, high in keys:
        ranges = sorted(
            (low if window is None else max(low, first - window + 1), min(high, past)) for first, past in queries
        )
        visible += _union(ranges)
    return tuple(visible)


def reach(shares: Sequence[Spans]) -> tuple[int, ...]:
    """Return, for each rank r, the number of ring steps from r to the farthest rank that sees any key of r."""
    return _reach(tuple(shares))


@lru_cache(maxsize=64)
def _reach(shares: tuple[Spans, ...]) -> tuple[int, ...]:
    ranks = len(shares)
    return tuple(
        next((step for step in reversed(range(ranks)) if needed(shares[(rank + step) % ranks], shares[rank])), 0)
        for rank in range(ranks)
    )


def _union(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sorted ``ranges`` with overlapping ranges merged and without empty ranges."""
    merged: list[tuple[int, int]] = []
    for low, high in ranges:
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged

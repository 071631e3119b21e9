"""Attention cut into rectangles of queries and keys, so that kernels without masks compute most of it.

Attention is causal, possibly within a window. Given the positions of ranges of queries and keys in the sequence, a
rectangle of query-key pairs is one of four kinds: entirely masked, and left out; unmasked; a square on the diagonal,
which kernels compute as causal attention; or on the edge of a window, where it needs a mask. No tensors are used here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.sequence import Spans

Range = tuple[int, int]
"""First index of a range, and the index after the range."""


class Rectangle(NamedTuple):
    """A range of queries and the range of keys that they attend to, among the tokens held on this rank."""

    queries: Range
    keys: Range
    first_query: int
    """Position of the first query in the sequence."""
    first_key: int
    kind: Literal["all", "causal", "masked"]
    """Keys that the i-th query sees: all, the first i (with as many queries as keys), or the keys in a mask."""


@lru_cache(maxsize=4096)
def rectangles(queries: Spans, keys: Spans, window: int | None) -> tuple[Rectangle, ...]:
    """Return all rectangles of the ranges ``queries`` and ``keys``, except rectangles that are entirely masked.

    Every unmasked pair of a query and a key is in exactly one rectangle.
    """
    parts: list[Rectangle] = []
    query = 0
    for span in queries:
        key = 0
        for other in keys:
            parts += [_shifted(rectangle, query - span[0], key - other[0]) for rectangle in _parts(span, other, window)]
            key += other[1] - other[0]
        query += span[1] - span[0]
    return tuple(parts)


@lru_cache(maxsize=4096)
def joined(queries: Spans, keys: Spans, window: int | None) -> tuple[Rectangle, ...]:
    """Return :func:`rectangles` with unmasked neighbours joined; the positions of joined rectangles are not valid."""
    row_joined = _join(rectangles(queries, keys, window), by_keys=True)
    return tuple(_join(row_joined, by_keys=False))


def within(rectangle: Rectangle, start: int, stop: int, window: int | None) -> list[Rectangle]:
    """Return the part of ``rectangle`` whose queries and keys are at positions ``start`` to ``stop``, as rectangles."""
    queries, keys = (
        (max(start, place), min(stop, place + span[1] - span[0]))
        for place, span in ((rectangle.first_query, rectangle.queries), (rectangle.first_key, rectangle.keys))
    )
    query, key = rectangle.queries[0] - rectangle.first_query, rectangle.keys[0] - rectangle.first_key
    return [_shifted(part, query, key) for part in _parts(queries, keys, window)]


def pieces(rectangle: Rectangle, window: int | None, most: int) -> tuple[Rectangle, ...]:
    """Cut a rectangle into masked rectangles of about ``most`` pairs or fewer; keys that no query sees are left out."""
    (start, stop), first, key = rectangle.queries, rectangle.first_query, rectangle.first_key
    past = key + rectangle.keys[1] - rectangle.keys[0]
    cut = []
    while start < stop:
        rows = min(stop - start, _rows(first, key, window, most))
        low = key if window is None else max(key, first - window + 1)
        high = min(past, first + rows)
        if low < high:
            shift = rectangle.keys[0] - key
            cut.append(Rectangle((start, start + rows), (low + shift, high + shift), first, low, "masked"))
        start, first = start + rows, first + rows
    return tuple(cut)


def _rows(first: int, key: int, window: int | None, most: int) -> int:
    """Return how many queries, starting at ``first``, have at most about ``most`` pairs with keys in total."""
    before = max(0, first - key if window is None else min(first - key, window - 1))
    # rows · (before + rows) <= most; rows beyond a window would mostly be paired with keys that they do not see.
    rows = int(((before * before + 4 * most) ** 0.5 - before) / 2)
    return max(1, rows if window is None else min(rows, max(window, 128)))


def _parts(queries: Range, keys: Range, window: int | None) -> Iterable[Rectangle]:
    """Yield the rectangles of one range of queries and one range of keys; all ranges are positions in the sequence."""
    (first, past), (low, high) = queries, keys
    if first >= past or low >= high:
        return
    high = min(high, past)
    low = low if window is None else max(low, first - window + 1)
    first = max(first, low)
    past = past if window is None else min(past, high - 1 + window)
    if low >= high or first >= past:
        return
    if window is not None and past - 1 - low >= window:
        yield Rectangle((first, past), (low, high), first, low, "masked")
        return
    if low < min(first, high):
        yield Rectangle((first, past), (low, min(first, high)), first, low, "all")
    if first < high:
        yield Rectangle((first, high), (first, high), first, first, "causal")
        if high < past:
            yield Rectangle((high, past), (first, high), high, first, "all")


def _shifted(rectangle: Rectangle, query: int, key: int) -> Rectangle:
    """Return the rectangle with ranges shifted by ``query`` and ``key``, from positions to indices on this rank."""
    (first, past), (low, high) = rectangle.queries, rectangle.keys
    return rectangle._replace(queries=(first + query, past + query), keys=(low + key, high + key))


def _join(parts: Iterable[Rectangle], *, by_keys: bool) -> list[Rectangle]:
    """Join unmasked neighbours that have the same queries, or the same keys."""
    merged: list[Rectangle] = []
    for part in sorted(parts, key=lambda part: (part.kind, part.queries if by_keys else part.keys, part.keys)):
        last = merged[-1] if merged else None
        if last is None or last.kind != "all" or part.kind != "all":
            merged.append(part)
        elif by_keys and last.queries == part.queries and last.keys[1] == part.keys[0]:
            merged[-1] = last._replace(keys=(last.keys[0], part.keys[1]))
        elif not by_keys and last.keys == part.keys and last.queries[1] == part.queries[0]:
            merged[-1] = last._replace(queries=(last.queries[0], part.queries[1]))
        else:
            merged.append(part)
    return merged

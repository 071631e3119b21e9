"""Decide which tokens of a sequence and which heads each rank of a sequence-parallel group holds.

The data loader cuts sequences with these functions, the runtime derives masks and positions from them, and the planner
uses them for counting. Sizes need not be divisible by the number of ranks; parts then differ by at most one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Order = Literal["contiguous", "zigzag", "grid"]
"""contiguous: one span of the sequence per rank. zigzag: one span from the front and one from the back, which balances
the work of causal attention. grid: the same columns of every row of a sequence with two axes."""
Spans = tuple[tuple[int, int], ...]
"""Non-empty spans of the sequence (first and one-past-last token), in the order in which a rank holds them."""


def even(size: int, parts: int) -> list[int]:
    """Return part sizes of ``size`` that differ by at most one, larger first; some are 0 if ``parts`` > ``size``."""
    small, more = divmod(size, parts)
    return [small + (part < more) for part in range(parts)]


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the beginning and the end of each of several consecutive spans, which have the given ``sizes``."""
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return ranges


def contiguous(length: int, ranks: int) -> tuple[Spans, ...]:
    """Return one contiguous span of the sequence per rank."""
    return tuple(_spans(span) for span in bounds(even(length, ranks)))


def zigzag(length: int, ranks: int) -> tuple[Spans, ...]:
    """Divide the sequence into 2·ranks spans, and return, for each rank r, spans r and 2·ranks-1-r.

    This balances causal attention as in https://github.com/zhuzilin/ring-flash-attention.
    """
    pieces = bounds(even(length, 2 * ranks))
    return tuple(_spans(pieces[rank], pieces[2 * ranks - 1 - rank]) for rank in range(ranks))


def grid(rows: int, columns: int, ranks: int) -> tuple[Spans, ...]:
    """Return each rank's tokens if every rank holds some columns of a grid of ``rows * columns`` row-major tokens."""
    cuts = bounds(even(columns, ranks))
    return tuple(
        _spans(*((row * columns + start, row * columns + stop) for row in range(rows))) for start, stop in cuts
    )


def split(spans: Spans, ranks: int) -> tuple[Spans, ...]:
    """Divide the tokens of concatenated spans evenly over ranks, in order."""
    parts = []
    for start, stop in bounds(even(tokens(spans), ranks)):
        mine, place = [], 0
        for first, last in spans:
            low, high = max(start - place, 0), min(stop - place, last - first)
            mine.append((first + low, first + max(low, high)))
            place += last - first
        parts.append(_spans(*mine))
    return tuple(parts)


def joined(shares: Sequence[Spans], inner: int) -> tuple[Spans, ...]:
    """Concatenate the spans of every ``inner`` consecutive ranks; the inverse of :func:`split`."""
    groups = (shares[first : first + inner] for first in range(0, len(shares), inner))
    return tuple(_spans(*(span for spans in group for span in spans)) for group in groups)


def tokens(spans: Spans) -> int:
    """Return the number of tokens in the spans."""
    return sum(stop - start for start, stop in spans)


def index(spans: Spans) -> list[int]:
    """Return the position in the sequence of each token of the spans, in the order of the spans."""
    return [place for start, stop in spans for place in range(start, stop)]


def shares(
    length: int, ranks: int, order: Order = "contiguous", *, inner: int = 1, columns: int = 0
) -> tuple[Spans, ...]:
    """Return the spans that each rank of a group holds.

    For Ulysses inside a ring (USP, arXiv 2405.07719), every ``inner`` consecutive ranks divide the spans that one rank
    would hold in a group of ``ranks / inner`` ranks. ``columns`` is the number of columns of a grid.
    """
    if order == "grid":
        return grid(length // columns, columns, ranks)
    outer = (zigzag if order == "zigzag" else contiguous)(length, ranks // inner)
    return tuple(mine for spans in outer for mine in split(spans, inner))


class Deal(NamedTuple):
    """Heads that one rank of a group computes while it holds the whole sequence."""

    queries: tuple[int, int]
    """First and one past the last query head."""
    keys: tuple[int, int]
    """First and one past the last key/value head that these query heads read; neighbouring ranks may share a head."""

    def keys_of_queries(self, queries: int, keys: int) -> list[int]:
        """Return the index of the key head that each query head of the rank reads, counted among the rank's key heads.

        ``queries`` and ``keys`` are the numbers of heads of the whole model.
        """
        return [head * keys // queries - self.keys[0] for head in range(*self.queries)]


def deal_heads(queries: int, keys: int, ranks: int) -> tuple[Deal, ...]:
    """Divide query heads evenly over ranks, and give each rank the key heads that its queries read.

    A key head that several ranks need goes to each of them, so there may be fewer key heads than ranks. A rank without
    query heads gets no key head.
    """
    deals = []
    for first, stop in bounds(even(queries, ranks)):
        needed = (first * keys // queries, (stop - 1) * keys // queries + 1) if stop > first else (0, 0)
        deals.append(Deal((first, stop), needed))
    return tuple(deals)


def _spans(*spans: tuple[int, int]) -> Spans:
    """Return ``spans`` in order, without empty spans and with adjacent spans joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)

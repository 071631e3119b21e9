"""Which tokens of a sequence, and which heads, each rank of a sequence-parallel group holds.

One record for everybody: the data is cut by it, the runtime takes masks and positions from it, the planner counts with
it. Nothing needs to divide: sizes that do not are dealt so that no two ranks differ by more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Order = Literal["contiguous", "zigzag", "grid"]
"""contiguous: one stretch of the sequence per rank. zigzag: one from the front and one from the back, so that all ranks
have as much work where a token sees all earlier ones. grid: the same columns of every row of a sequence of two axes."""
Spans = tuple[tuple[int, int], ...]
"""Stretches of the sequence, first and one past the last token, none empty, in the order in which a rank holds them."""


def even(size: int, parts: int) -> list[int]:
    """Return sizes of parts that differ by at most one, the larger ones first; some are 0 if there are more parts."""
    small, more = divmod(size, parts)
    return [small + (part < more) for part in range(parts)]


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return where stretches of these sizes, one behind the other, begin and end."""
    found, start = [], 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found


def contiguous(length: int, ranks: int) -> tuple[Spans, ...]:
    """Return one stretch per rank."""
    return tuple(_spans(span) for span in bounds(even(length, ranks)))


def zigzag(length: int, ranks: int) -> tuple[Spans, ...]:
    """Return stretch r and stretch 2·ranks-1-r of 2·ranks for each rank r.

    The balance of causal work is that of https://github.com/zhuzilin/ring-flash-attention.
    """
    pieces = bounds(even(length, 2 * ranks))
    return tuple(_spans(pieces[rank], pieces[2 * ranks - 1 - rank]) for rank in range(ranks))


def grid(rows: int, columns: int, ranks: int) -> tuple[Spans, ...]:
    """Return the same columns of every row for each rank, of ``rows * columns`` tokens that lie row by row."""
    cuts = bounds(even(columns, ranks))
    return tuple(
        _spans(*((row * columns + start, row * columns + stop) for row in range(rows))) for start, stop in cuts
    )


def split(spans: Spans, ranks: int) -> tuple[Spans, ...]:
    """Deal the tokens of some stretches, taken one behind the other, to ranks, in order and evenly."""
    found = []
    for start, stop in bounds(even(tokens(spans), ranks)):
        mine, place = [], 0
        for first, last in spans:
            low, high = max(start - place, 0), min(stop - place, last - first)
            mine.append((first + low, first + max(low, high)))
            place += last - first
        found.append(_spans(*mine))
    return tuple(found)


def joined(shares: Sequence[Spans], inner: int) -> tuple[Spans, ...]:
    """Return what every ``inner`` consecutive ranks hold together, one behind the other: what :func:`split` dealt."""
    groups = (shares[first : first + inner] for first in range(0, len(shares), inner))
    return tuple(_spans(*(span for spans in group for span in spans)) for group in groups)


def tokens(spans: Spans) -> int:
    """Return how many tokens stretches hold."""
    return sum(stop - start for start, stop in spans)


def index(spans: Spans) -> list[int]:
    """Return the places in the sequence of the tokens of some stretches, in order."""
    return [place for start, stop in spans for place in range(start, stop)]


def shares(
    length: int, ranks: int, order: Order = "contiguous", *, inner: int = 1, columns: int = 0
) -> tuple[Spans, ...]:
    """Return what each rank of a group holds.

    ``inner`` consecutive ranks share, each with a stretch of it, what one rank would hold in a group of
    ``ranks / inner``: Ulysses inside of a ring (USP, arXiv 2405.07719). ``columns`` is the length of a row of a grid.
    """
    if order == "grid":
        return grid(length // columns, columns, ranks)
    outer = (zigzag if order == "zigzag" else contiguous)(length, ranks // inner)
    return tuple(mine for spans in outer for mine in split(spans, inner))


class Deal(NamedTuple):
    """Heads that one rank of a group works on when it holds the whole sequence."""

    queries: tuple[int, int]
    """First and one past the last query head."""
    keys: tuple[int, int]
    """Heads of keys and values that these need; neighbours may need the same one."""

    def keys_of_queries(self, queries: int, keys: int) -> list[int]:
        """Return, for each of its query heads, which of its key heads it reads; ``queries`` and ``keys`` are all."""
        return [head * keys // queries - self.keys[0] for head in range(*self.queries)]


def deal_heads(queries: int, keys: int, ranks: int) -> tuple[Deal, ...]:
    """Deal query heads evenly, and to each rank the heads of keys that its queries read.

    A head of keys that several ranks need goes to each of them, so there may be fewer than ranks. A rank without query
    heads gets nothing.
    """
    found = []
    for first, stop in bounds(even(queries, ranks)):
        needed = (first * keys // queries, (stop - 1) * keys // queries + 1) if stop > first else (0, 0)
        found.append(Deal((first, stop), needed))
    return tuple(found)


def _spans(*spans: tuple[int, int]) -> Spans:
    """Return stretches without empty ones, neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)

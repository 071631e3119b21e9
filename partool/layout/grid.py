"""Choose the axis that is cut over ranks for sequences whose tokens form a grid, and the layers where the axis changes.

A layer that attends along rows needs whole rows on each rank. A layer that attends along columns needs whole columns.
DSP (arXiv 2403.10266) cuts the axis along which the layer does not attend. Between layers that attend along different
axes, an all-to-all re-shards the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.sequence import Spans, bounds, even, tokens
from partool.layout.sequence import grid as whole_columns

Axis = Literal["row", "column"]
"""Axis along which a layer attends: each rank holds whole rows for ``row``, whole columns for ``column``."""


class Turn(NamedTuple):
    """Exchanges (all-to-all) before and after one layer."""

    before: Axis | None
    """Axis that the exchange before the layer makes whole on each rank; None means no exchange."""
    after: Axis | None
    """Axis that the exchange after the layer makes whole on each rank; None means no exchange."""


def turns(axes: Sequence[Axis], *, around: Axis = "column") -> tuple[Turn, ...]:
    """Return the exchanges around each of several consecutive layers.

    Before the first layer and after the last layer, each rank holds whole rows or whole columns, as ``around`` says.
    Two consecutive layers that attend along different axes therefore cost two exchanges, whichever comes first.
    """
    axis_now, exchanges_around = around, []
    for place, axis in enumerate(axes):
        after = around if place == len(axes) - 1 and axis != around else None
        exchanges_around.append(Turn(axis if axis != axis_now else None, after))
        axis_now = axis
    return tuple(exchanges_around)


def exchanges(axes: Sequence[Axis], *, around: Axis = "column") -> int:
    """Return the number of all-to-all exchanges in a forward pass through layers that attend along ``axes``."""
    return sum((turn.before is not None) + (turn.after is not None) for turn in turns(axes, around=around))


def whole_rows(rows: int, columns: int, ranks: int) -> tuple[Spans, ...]:
    """Return the tokens of each rank if every rank holds whole rows (:func:`sequence.grid` is for whole columns)."""
    cuts = bounds(even(rows, ranks))
    return tuple(((first * columns, stop * columns),) if stop > first else () for first, stop in cuts)


@lru_cache(maxsize=64)
def tokens_by_rank(grid: tuple[int, int], ranks: int, axis: Axis, tensor: int = 1) -> tuple[Spans, ...]:
    """Return the tokens of each rank if every rank holds whole rows, or whole columns, of a ``(rows, columns)`` grid.

    With ``tensor`` > 1 (norms on shares of the sequence) the tokens of each rank are divided over ``tensor`` tensor
    ranks, and the result has one entry per tensor rank. Each tensor
    rank takes the quotient rounded up; the last tensor ranks have fewer tokens.
    """
    rank_spans = whole_rows(*grid, ranks) if axis == "row" else whole_columns(*grid, ranks)
    return rank_spans if tensor == 1 else tuple(part for spans in rank_spans for part in _chunks(spans, tensor))


def _chunks(spans: Spans, parts: int) -> list[Spans]:
    size = -(-tokens(spans) // parts)
    chunks = []
    for part in range(parts):
        mine, place = [], 0
        for start, stop in spans:
            low, high = max(part * size - place, 0), min((part + 1) * size - place, stop - start)
            if low < high:
                mine.append((start + low, start + high))
            place += stop - start
        chunks.append(tuple(mine))
    return chunks


def common(one: Spans, other: Spans) -> int:
    """Return how many tokens the spans of two ranks have in common. The spans must be in the order of the sequence."""
    shared, first, second = 0, 0, 0
    while first < len(one) and second < len(other):
        shared += max(0, min(one[first][1], other[second][1]) - max(one[first][0], other[second][0]))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return shared

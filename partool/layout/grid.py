"""Sequences whose tokens form a grid: the axis that is cut over ranks, and the layers where it changes.

A layer that attends along rows needs whole rows on each rank, a layer that attends along columns whole columns. DSP
(arXiv 2403.10266) cuts the other axis; between layers of different axes an all-to-all re-shards the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.sequence import Spans, bounds, even, tokens
from partool.layout.sequence import grid as whole_columns

Axis = Literal["row", "column"]
"""Axis along which a layer attends: each rank then holds whole rows, or whole columns."""


class Turn(NamedTuple):
    """Exchanges (all-to-all) before and after one layer."""

    before: Axis | None
    """Axis that the exchange before the layer makes whole on each rank; None means no exchange."""
    after: Axis | None
    """Axis that the exchange after the layer makes whole on each rank; None means no exchange."""


def turns(axes: Sequence[Axis], *, around: Axis = "column") -> tuple[Turn, ...]:
    """Return the exchanges around each of several consecutive layers.

    Before the first and after the last layer each rank holds whole rows or columns, as ``around`` says, so a pair of
    layers of different axes costs two exchanges, in either order.
    """
    held, found = around, []
    for place, axis in enumerate(axes):
        after = around if place == len(axes) - 1 and axis != around else None
        found.append(Turn(axis if axis != held else None, after))
        held = axis
    return tuple(found)


def exchanges(axes: Sequence[Axis], *, around: Axis = "column") -> int:
    """Return the number of exchanges of the hidden state in a forward pass through these layers."""
    return sum((turn.before is not None) + (turn.after is not None) for turn in turns(axes, around=around))


def whole_rows(rows: int, columns: int, ranks: int) -> tuple[Spans, ...]:
    """Return the tokens of each rank if it holds whole rows; ``sequence.grid`` is for whole columns."""
    cuts = bounds(even(rows, ranks))
    return tuple(((first * columns, stop * columns),) if stop > first else () for first, stop in cuts)


@lru_cache(maxsize=64)
def held(grid: tuple[int, int], ranks: int, axis: Axis, tensor: int = 1) -> tuple[Spans, ...]:
    """Return the tokens of each rank if it holds whole rows, or whole columns, of a grid of ``(rows, columns)``.

    With ``tensor`` > 1 (norms on shares of the sequence) each rank's tokens are divided over its tensor ranks, which
    get one entry each: the quotient rounded up, so that the last ranks have fewer.
    """
    found = whole_rows(*grid, ranks) if axis == "row" else whole_columns(*grid, ranks)
    return found if tensor == 1 else tuple(part for spans in found for part in _chunks(spans, tensor))


def _chunks(spans: Spans, parts: int) -> list[Spans]:
    size = -(-tokens(spans) // parts)
    found = []
    for part in range(parts):
        mine, place = [], 0
        for start, stop in spans:
            low, high = max(part * size - place, 0), min((part + 1) * size - place, stop - start)
            if low < high:
                mine.append((start + low, start + high))
            place += stop - start
        found.append(tuple(mine))
    return found


def common(one: Spans, other: Spans) -> int:
    """Return how many tokens the spans of two ranks have in common; the spans are in the order of the sequence."""
    found, left, right = 0, 0, 0
    while left < len(one) and right < len(other):
        found += max(0, min(one[left][1], other[right][1]) - max(one[left][0], other[right][0]))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found

"""Sequences whose tokens lie on a grid: which of its two axes is cut over ranks, and where layers change that.

A layer that attends along rows needs whole rows, one that attends along columns whole columns. DSP (arXiv 2403.10266)
keeps the other axis cut, and between layers of different axes every rank trades its part of the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.sequence import Spans, bounds, even, tokens
from partool.layout.sequence import grid as whole_columns

Axis = Literal["row", "column"]
"""Along which a layer attends, and what a rank then holds whole ones of."""


class Turn(NamedTuple):
    """The exchanges before and after one layer."""

    before: Axis | None
    """Whole ones of which axis a rank must get before it; None: it holds them already."""
    after: Axis | None


def turns(axes: Sequence[Axis], *, around: Axis = "column") -> tuple[Turn, ...]:
    """Return what happens around each of some layers that follow each other.

    Before the first and behind the last of them a rank holds whole ones of ``around``, so pairs of layers of different
    axes cost two exchanges each, whichever comes first.
    """
    held, found = around, []
    for place, axis in enumerate(axes):
        after = around if place == len(axes) - 1 and axis != around else None
        found.append(Turn(axis if axis != held else None, after))
        held = axis
    return tuple(found)


def exchanges(axes: Sequence[Axis], *, around: Axis = "column") -> int:
    """Return how often a forward pass through these layers trades the hidden state."""
    return sum((turn.before is not None) + (turn.after is not None) for turn in turns(axes, around=around))


def whole_rows(rows: int, columns: int, ranks: int) -> tuple[Spans, ...]:
    """Return the tokens of each rank where it holds whole rows; of whole columns see ``sequence.grid``."""
    cuts = bounds(even(rows, ranks))
    return tuple(((first * columns, stop * columns),) if stop > first else () for first, stop in cuts)


@lru_cache(maxsize=64)
def held(grid: tuple[int, int], ranks: int, axis: Axis, tensor: int = 1) -> tuple[Spans, ...]:
    """Return the tokens of each rank where it holds whole rows, or whole columns, of a grid of ``(rows, columns)``.

    Where tensor ranks share them (norms on shares of the sequence), those of each of these, rank by rank: as many as
    the tokens over the tensor ranks, rounded up, so that the last ones have fewer.
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
    """Return how many tokens two ranks' stretches, each in the order of the sequence, have in common."""
    found, left, right = 0, 0, 0
    while left < len(one) and right < len(other):
        found += max(0, min(one[left][1], other[right][1]) - max(one[left][0], other[right][0]))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found

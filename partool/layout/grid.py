"""Sequences whose tokens lie on a grid: which of its two axes is cut over ranks, and where layers change that.

A layer that attends along rows needs whole rows, one that attends along columns whole columns. DSP (arXiv 2403.10266)
keeps the other axis cut, and between layers of different axes every rank trades its part of the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from partool.layout.sequence import Spans, bounds, even

Axis = Literal["row", "column"]
"""Along which a layer attends, and what a rank then holds whole ones of."""


class Turn(NamedTuple):
    """What happens around one layer."""

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

"""What a rank of DSP sends (arXiv 2403.10266), counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence_types import Sent
from partool.layout.grid import Axis, Turn, turns
from partool.layout.sequence import even


def sent(grid: tuple[int, int], ranks: int, rank: int, turn: Turn, width: int) -> Sent:
    """Return what a rank sends around one layer for one micro-batch, of a grid of ``(rows, columns)``.

    ``width`` is that of the hidden state it holds per token, times sequences. Attention itself sends nothing; what
    turns goes back the same way as gradients, and is not computed again. Where sizes divide, an exchange takes
    1 - 1/ranks of what a rank holds, whichever way.
    """
    ways = [way for way in turn if way is not None]
    return Sent(
        forward=width * sum(_exchanged(grid, ranks, rank, way) for way in ways),
        backward=width * sum(_exchanged(grid, ranks, rank, "row" if way == "column" else "column") for way in ways),
    )


def sent_by_stages(grid: tuple[int, int], ranks: int, rank: int, axes: Sequence[Sequence[Axis]], width: int) -> Sent:
    """Return the same of some stages, given the axes of the layers of each: every one begins and ends alike."""
    parts = [sent(grid, ranks, rank, turn, width) for stage in axes for turn in turns(stage)]
    return Sent(sum(part.forward for part in parts), sum(part.backward for part in parts))


def _exchanged(grid: tuple[int, int], ranks: int, rank: int, to: Axis) -> int:
    """Return the tokens that a rank gives away to get whole lines of an axis."""
    rows, columns = grid
    of_rows, of_columns = even(rows, ranks)[rank], even(columns, ranks)[rank]
    return of_columns * (rows - of_rows) if to == "row" else of_rows * (columns - of_columns)

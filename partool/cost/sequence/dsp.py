"""Elements that a rank of DSP sends (arXiv 2403.10266), counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost import collective, tensor_shares
from partool.cost.case import Column
from partool.cost.sequence.types import (
    NOTHING,
    TRADE_OPERATORS,
    AttentionBuffers,
    AttentionSizes,
    ExchangeTime,
    Sent,
    SentParts,
    SequencePass,
    SequenceTeams,
)
from partool.layout.grid import Turn, common, tokens_by_rank
from partool.layout.sequence import Spans, tokens


def sent(grid: tuple[int, int], ranks: int, rank: int, turn: Turn, width: int, *, tensor: int = 1) -> Sent:
    """Return how many elements a rank sends before and after a layer, for a micro-batch of a ``(rows, columns)`` grid.

    ``width`` is the number of elements of a token's hidden state, times the number of sequences. With sharded norms,
    ``tensor`` tensor ranks share the tokens of each of the ``ranks`` sequence ranks, and ``rank`` is the index among
    all ``ranks`` × ``tensor`` ranks, with tensor ranks innermost. Attention itself sends nothing; gradients are
    exchanged in the reverse direction, and exchanges are not recomputed. Where sizes divide evenly, each exchange sends
    1 - 1/ranks of the elements that a rank holds.
    """
    ways = [way for way in turn if way is not None]
    columns, rows = (tokens_by_rank(grid, ranks, axis, tensor)[rank] for axis in ("column", "row"))
    stays = common(columns, rows)
    given = {"row": tokens(columns) - stays, "column": tokens(rows) - stays}
    return Sent(
        forward=width * sum(given[way] for way in ways),
        backward=width * sum(given["row" if way == "column" else "column"] for way in ways),
    )


def parts(team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
    """Return zero, as attention sends nothing; :func:`sent` counts the exchanges before and after layers."""
    return SentParts(NOTHING, NOTHING)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of the exchanges of the hidden state before and after a layer."""
    group = one.group(one.layouts.cp, 1)
    hidden = one.job.model.hidden / tensor_shares.stream(one.job, one.layouts)
    each = collective.all_to_all_s(one.job, one.rows * hidden * one.small, group)
    return ExchangeTime(turns=one.kind.turns * each, outer_operators=one.kind.turns * TRADE_OPERATORS)


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, of two copies of the hidden state."""
    return 2.0 * one.job.model.hidden / tensor_shares.stream(one.job, one.layouts) * one.small

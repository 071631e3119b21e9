"""Elements that a rank sends where all ranks all-gather keys and values, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost import collective
from partool.cost.case import Column
from partool.cost.sequence import halo as sequence_halo
from partool.cost.sequence.types import (
    GATHER_OPERATORS,
    NOTHING,
    AttentionBuffers,
    AttentionSizes,
    AttentionTransfer,
    ExchangeTime,
    Sent,
    SentParts,
    SequencePass,
    SequenceTeams,
)
from partool.layout.sequence import Spans, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return how many elements a rank sends in the attention of one layer; ``shares`` are the tokens of each rank.

    Keys and values are all-gathered in both passes, and their gradients (float32 or wider) are reduce-scattered.
    Collectives need shares of one size: smaller shares are sent as if they were as large as the largest. Layers with
    windows exchange only the keys and values inside the windows (:mod:`partool.cost.sequence.halo`).
    """
    if heads.window is not None and heads.window < sum(map(tokens, shares)):
        return sequence_halo.sent(shares, heads, rank)
    size = heads.batch * heads.keys * (heads.key_dim + heads.value_dim) * max(map(tokens, shares))
    others = (len(shares) - 1) * size
    return Sent(forward=others, backward=others, backward_wide=others)


def parts(team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
    """Return how many elements a rank sends in one layer: it sends in attention only."""
    return SentParts(sent(every, heads, rank), NOTHING)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of all-gathering keys and values, and in the backward pass of summing their gradients."""
    if one.windowed:
        return sequence_halo.exchange(one)
    group = one.group(one.layouts.cp, 1)
    elements = one.rows * one.layouts.cp * one.key_width
    seconds = ExchangeTime(
        steps=[AttentionTransfer(1, collective.gather_s(one.job, elements * one.small, group), 1.0 / one.layouts.cp)],
        core_operators=GATHER_OPERATORS * (2.0 if one.backward else 1.0),
    )
    if one.backward:
        seconds.inside = collective.reduce_scatter_s(one.job, elements * one.wide, group)
    return seconds


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, of all ranks' keys and values with their gradients (float32 or wider)."""
    if one.window is not None:
        return sequence_halo.buffers(one)
    return one.layouts.cp * one.sizes.keys * (one.small + one.wide) + one.sizes.query * one.wide

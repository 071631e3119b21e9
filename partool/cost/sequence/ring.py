"""Elements that a rank of ring attention sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partool.cost.case import Column
from partool.cost.sequence import halo as sequence_halo
from partool.cost.sequence import shares as sequence_shares
from partool.cost.sequence.ring_steps import hop_s, steps_of
from partool.cost.sequence.types import (
    NOTHING,
    AttentionBuffers,
    AttentionSizes,
    ExchangeTime,
    Sent,
    SentParts,
    SequencePass,
    SequenceTeams,
)
from partool.layout.reach import reach
from partool.layout.sequence import Spans, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return how many elements a rank sends in the attention of one layer; ``shares`` are tokens in ring order.

    Every rank's keys and values go around the ring to the last rank that attends to them. In the backward pass keys and
    values go around once more; their gradients (float32 or wider) start at the first rank that received the keys and
    return from the last. With zigzag shares of one size, each rank sends ranks - 1 shares. With contiguous shares,
    later shares are sent less far: the last rank sends nothing forward. Layers with windows exchange only the keys and
    values inside the windows (:mod:`partool.cost.sequence.halo`).
    """
    if heads.window is not None and heads.window < sum(map(tokens, shares)):
        return sequence_halo.sent(shares, heads, rank)
    ranks, reaches = len(shares), reach(shares)
    pair = heads.batch * heads.keys * (heads.key_dim + heads.value_dim)
    visitors = [(step, source, tokens(shares[source])) for step in range(ranks) for source in [(rank - step) % ranks]]
    keys = sum(size for step, source, size in visitors if step < reaches[source])
    gradients = sum(size for step, source, size in visitors if 0 < step <= reaches[source])
    return Sent(forward=keys * pair, backward=keys * pair, backward_wide=gradients * pair)


def parts(team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
    """Return how many elements a rank sends in one layer: it sends within attention only."""
    return SentParts(sent(every, heads, rank), NOTHING)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of a ring's steps; the stride of the ring is the number of ranks that exchange heads.

    In the backward pass the gradients of a block leave after the receiving rank has attended to it, so they are one
    step behind, and the last gradients return with no attention to overlap with.
    """
    if one.windowed:
        return sequence_halo.exchange(one)
    ranks, inner = sequence_shares.ring(one.layouts), sequence_shares.trading(one.layouts)
    block, group = one.rows * inner * one.key_width, one.group(ranks, inner)
    seconds = steps_of(one, ranks, block, group, alone=2)
    if one.backward:
        seconds.inside = np.minimum(np.maximum(ranks - 1, 0), 1) * hop_s(one, block * one.wide, group)
    return seconds


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, of the block in use, the block being received, and the rank's queries.

    The backward pass also needs gradients, in float32 or wider, of the block in use, of the block before it, of
    returning blocks, and of the rank's block.
    """
    if one.window is not None:
        return sequence_halo.buffers(one)
    return one.sizes.keys * (2.0 * one.small + 4.0 * one.wide) + one.sizes.query * one.wide

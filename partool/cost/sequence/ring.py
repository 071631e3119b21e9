"""What a rank of ring attention sends, counted exactly."""

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
    """Return what a rank sends in the attention of one layer; ``shares`` are those of all ranks, in the ring's order.

    Every rank's keys and values go around until the last rank that sees them, and once more in the backward pass; there
    their wide gradient begins with the first visitor and comes home from the last. Where shares are zigzag and of one
    size, that is ranks - 1 times a share each. Of contiguous shares later ones travel less: the last rank sends
    nothing forward. Layers with windows exchange only what is seen (:mod:`partool.cost.sequence.halo`).
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
    """Return what a rank sends in one layer: all within attention."""
    return SentParts(sent(every, heads, rank), NOTHING)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the steps of a ring, whose neighbours are as far apart as the ranks that trade heads are many.

    In the backward pass the gradients of a block leave once a visitor has attended to it, so they are a step behind,
    and the last ones go home beside nothing.
    """
    if one.windowed:
        return sequence_halo.exchange(one)
    ranks, inner = sequence_shares.ring(one.layouts), sequence_shares.trading(one.layouts)
    block, group = one.rows * inner * one.key_width, one.group(ranks, inner)
    found = steps_of(one, ranks, block, group, alone=2)
    if one.backward:
        found.inside = np.minimum(np.maximum(ranks - 1, 0), 1) * hop_s(one, block * one.wide, group)
    return found


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes per token of a rank of the block at work and the one that comes, and of the rank's queries.

    The backward pass adds wide gradients: of the one, of the one before, of those that come home, of a rank's own.
    """
    if one.window is not None:
        return sequence_halo.buffers(one)
    return one.sizes.keys * (2.0 * one.small + 4.0 * one.wide) + one.sizes.query * one.wide

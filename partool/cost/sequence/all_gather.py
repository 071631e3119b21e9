"""What a rank sends where all ranks gather keys and values, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence import halo as sequence_halo
from partool.cost.sequence.types import AttentionSizes, Sent
from partool.layout.sequence import Spans, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return what a rank sends in the attention of one layer; ``shares`` are those of all ranks.

    Keys and values are gathered in both passes, and their wide gradients are summed and scattered. Collectives want
    shares of one size: smaller ones travel as if they were as large as the largest. Layers with windows exchange only
    what is seen (:mod:`partool.cost.sequence.halo`).
    """
    if heads.window is not None and heads.window < sum(map(tokens, shares)):
        return sequence_halo.sent(shares, heads, rank)
    size = heads.batch * heads.keys * (heads.key_dim + heads.value_dim) * max(map(tokens, shares))
    others = (len(shares) - 1) * size
    return Sent(forward=others, backward=others, backward_wide=others)

"""What a rank of ring attention sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence import halo as sequence_halo
from partool.cost.sequence.types import AttentionSizes, Sent
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

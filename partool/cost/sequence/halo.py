"""What a rank sends where a layer's window lets only some keys of other ranks be seen, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence.types import AttentionSizes, Sent
from partool.layout.reach import needed
from partool.layout.sequence import Spans, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return what a rank sends in the attention of one layer; ``shares`` are those of all ranks.

    Keys and values that other ranks see go to them, in both passes, and the wide gradients of what it has seen itself
    go home. Of contiguous shares these are the window - 1 tokens before a share, of however many ranks they are.
    """
    pair = heads.batch * heads.keys * (heads.key_dim + heads.value_dim)
    others = [share for other, share in enumerate(shares) if other != rank]
    given = sum(tokens(needed(share, shares[rank], heads.window)) for share in others)
    seen = sum(tokens(needed(shares[rank], share, heads.window)) for share in others)
    return Sent(forward=given * pair, backward=given * pair, backward_wide=seen * pair)

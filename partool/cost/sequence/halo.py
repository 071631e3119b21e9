"""Elements that a rank sends where a layer's window covers only some keys of other ranks, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import ZIGZAG, Column
from partool.cost.sequence import shares as sequence_shares
from partool.cost.sequence.ring_steps import hop_s
from partool.cost.sequence.types import (
    BLOCK_OPERATORS,
    AttentionBuffers,
    AttentionSizes,
    AttentionTransfer,
    ExchangeTime,
    Sent,
    SequencePass,
)
from partool.cost.time.attention import keys_between
from partool.layout.reach import needed
from partool.layout.sequence import Spans, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return how many elements a rank sends in the attention of one layer; ``shares`` are the tokens of each rank.

    A rank sends its keys and values to the ranks whose windows cover them, in both passes, and returns the
    gradients (float32 or wider) of the keys and values that it has received. With contiguous shares a rank receives the
    window - 1 tokens before its share, from one or more ranks.
    """
    pair = heads.batch * heads.keys * (heads.key_dim + heads.value_dim)
    others = [share for other, share in enumerate(shares) if other != rank]
    given = sum(tokens(needed(share, shares[rank], heads.window)) for share in others)
    seen = sum(tokens(needed(shares[rank], share, heads.window)) for share in others)
    return Sent(forward=given * pair, backward=given * pair, backward_wide=seen * pair)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of exchanging keys and values of tokens before a rank's tokens, as far as windows reach.

    With zigzag the tokens of a rank have two parts, and the keys and values before each part are exchanged. In the
    backward pass keys are sent first; the gradients of keys return while a rank attends to its own tokens.
    """
    inner = sequence_shares.trading(one.layouts)
    ranks = one.layouts.cp // inner
    group = one.group(ranks, inner)
    share = tensor_shares.width(one.job.sequence_length, ranks)
    stretches = np.where(np.asarray(one.layouts.sequence_order) == ZIGZAG, 2, 1)
    rows = np.minimum(stretches * ((one.kind.window or 1) - 1), one.job.sequence_length - share)
    elements = one.layouts.micro_batch * rows * one.key_width
    window, near = one.kind.window or 1, np.where(ranks > 1, np.minimum(rows, 1), 0)
    # Gradients return while the rank attends to its own tokens.
    piece = share / stretches
    local_share = keys_between(0, piece, window) / np.minimum(window, one.job.sequence_length)
    narrow, wide = (hop_s(one, elements * width, group) for width in (one.small, one.wide))
    if not one.backward:
        return ExchangeTime(steps=[AttentionTransfer(near, narrow, local_share)], core_operators=BLOCK_OPERATORS)
    return ExchangeTime(
        inside=near * narrow, steps=[AttentionTransfer(near, wide, local_share)], core_operators=2 * BLOCK_OPERATORS
    )


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, of the neighbours' keys and values with their gradients."""
    # Rows of neighbours as a share of a rank's own tokens.
    near = sequence_shares.tokens(one.job, one.layouts) * sequence_shares.trading(one.layouts)
    share = np.minimum(((one.window or 1) - 1) / np.maximum(near, 1), one.layouts.cp)
    return share * one.sizes.keys * (one.small + one.wide) + one.sizes.query * one.wide

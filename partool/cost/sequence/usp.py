"""Elements that a rank of USP (Ulysses inside of a ring) sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partool.cost.case import Column
from partool.cost.sequence import ring as sequence_ring
from partool.cost.sequence import ulysses as sequence_ulysses
from partool.cost.sequence.types import (
    AttentionBuffers,
    AttentionSizes,
    ExchangeTime,
    Sent,
    SentParts,
    SequencePass,
    SequenceTeams,
)
from partool.layout.sequence import Spans, joined


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int, inner: int) -> Sent:
    """Return how many elements a rank sends in the attention of one layer; ``shares`` are the tokens of each rank.

    In its group of ``inner`` neighbours a rank exchanges tokens for heads. Then keys and values of the group's tokens,
    for the heads that the rank attends with, go around a ring of groups.
    """
    group, place = divmod(rank, inner)
    traded = sequence_ulysses.sent(shares[group * inner : (group + 1) * inner], heads, place)
    around = sequence_ring.sent(joined(shares, inner), sequence_ulysses.inside(heads, inner, place), group)
    return Sent(*(a + b for a, b in zip(traded, around, strict=True)))


def parts(team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
    """Return how many elements a rank sends in one layer: heads around attention, keys and values within it."""
    group, place = divmod(rank, team.inner)
    mine = every[group * team.inner : (group + 1) * team.inner]
    around = sequence_ulysses.sent(mine, heads, place)
    both = sent(every, heads, rank, team.inner)
    return SentParts(Sent(*(a - b for a, b in zip(both, around, strict=True))), around)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of exchanging heads within groups, and of the steps of the ring of groups."""
    seconds = sequence_ulysses.exchange(one)
    seconds.add(True, sequence_ring.exchange(one))
    return seconds


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, that the exchange of heads or the ring needs, whichever needs more."""
    return np.maximum(sequence_ulysses.buffers(one), sequence_ring.buffers(one))

"""What a rank of USP, Ulysses inside of a ring, sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence import ring as sequence_ring
from partool.cost.sequence import ulysses as sequence_ulysses
from partool.cost.sequence.types import AttentionSizes, Sent
from partool.layout.sequence import Spans, joined


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int, inner: int) -> Sent:
    """Return what a rank sends in the attention of one layer; ``shares`` are those of all ranks.

    In its group of ``inner`` neighbours it trades tokens for heads; the tokens of the group go around a ring of groups,
    of the heads that it then works on.
    """
    group, place = divmod(rank, inner)
    traded = sequence_ulysses.sent(shares[group * inner : (group + 1) * inner], heads, place)
    around = sequence_ring.sent(joined(shares, inner), sequence_ulysses.inside(heads, inner, place), group)
    return Sent(*(a + b for a, b in zip(traded, around, strict=True)))

"""Attention heads over tensor-parallel ranks: whole heads of keys and values, each with the query heads it serves."""

from __future__ import annotations

from dataclasses import dataclass

from partool.layout.tensor.types import Range, chunks


@dataclass(frozen=True, slots=True)
class HeadRanges:
    """Per tensor rank, first and one-past-last head; equal numbers: none."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    """Of keys and values; neighbouring ranks may hold the same head."""
    shared: bool
    """True where ranks hold the same heads of keys and values, each for a part of the query heads."""

    @property
    def idle(self) -> int:
        """Ranks without a query head."""
        return sum(start == stop for start, stop in self.queries)


def head_ranges(heads: int, kv_heads: int, ranks: int) -> HeadRanges:
    """Deal heads to ranks; ``heads`` is a multiple of ``kv_heads``.

    Heads of keys and values are cut by ``torch.chunk`` sizes (7 over 3: 3, 3, 1), and query heads follow the one that
    serves them. Where there are fewer of them than ranks, and each serves several query heads, each lies on a run of
    neighbouring ranks, which share its query heads by the same sizes; a rank that gets none of them holds nothing.
    """
    group = heads // kv_heads
    if kv_heads >= ranks or group == 1:
        keys = chunks(kv_heads, ranks)
        return HeadRanges(tuple((start * group, stop * group) for start, stop in keys), tuple(keys), shared=False)
    queries: list[Range] = []
    keys = []
    for head in range(kv_heads):
        # Not torch.chunk: every head needs a rank, also 4 heads on 5 ranks.
        sharing = (head + 1) * ranks // kv_heads - head * ranks // kv_heads
        for start, stop in chunks(group, sharing):
            queries.append((head * group + start, head * group + stop))
            keys.append((head, head + 1 if stop > start else head))
    return HeadRanges(tuple(queries), tuple(keys), shared=True)

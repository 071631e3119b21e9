"""Cut one dimension over ranks, and merge the :class:`Partition` rows of parameters that are partitioned alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from partool.layout.tensor.types import Cut, Partition, Range, chunks


@dataclass(frozen=True, slots=True)
class HeadRanges:
    """First and one-past-last head of each tensor rank; equal numbers mean no head."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    """Range of key/value heads of each rank; neighbouring ranks may hold the same head."""
    shared: bool
    """True if several ranks hold the same key/value head, each with a part of the query heads that read it."""

    @property
    def idle(self) -> int:
        """Return the number of ranks that have no query head."""
        return sum(start == stop for start, stop in self.queries)


def head_ranges(heads: int, kv_heads: int, ranks: int) -> HeadRanges:
    """Divide heads over ranks; ``heads`` is a multiple of ``kv_heads``.

    Key/value heads are cut by ``torch.chunk`` sizes (7 heads over 3 ranks: 3, 3, 1), and query heads are placed with
    the key/value head that they read. If there are fewer key/value heads than ranks, and several query heads read each
    key/value head, the key/value head is replicated on neighbouring ranks, which divide its query heads by
    ``torch.chunk`` sizes. A rank without query heads has no key/value head.
    """
    group = heads // kv_heads
    if kv_heads >= ranks or group == 1:
        keys = chunks(kv_heads, ranks)
        return HeadRanges(tuple((start * group, stop * group) for start, stop in keys), tuple(keys), shared=False)
    queries: list[Range] = []
    keys = []
    for head in range(kv_heads):
        # torch.chunk sizes cannot be used here: every head needs a rank, even with 4 heads on 5 ranks.
        sharing = (head + 1) * ranks // kv_heads - head * ranks // kv_heads
        for start, stop in chunks(group, sharing):
            queries.append((head * group + start, head * group + stop))
            keys.append((head, head + 1 if stop > start else head))
    return HeadRanges(tuple(queries), tuple(keys), shared=True)


def cut(dim: int, ranges: Iterable[Range], unit: int = 1) -> Cut:
    """Return the cut of a dimension in which each rank holds one range of units (heads, or single widths)."""
    return Cut(
        dim=dim,
        ranges=tuple(((start * unit, stop * unit),) if stop > start else () for start, stop in ranges),
    )


def even(dim: int, size: int, ranks: int) -> Cut:
    """Return the cut of dimension ``dim``, which has ``size`` elements, by ``torch.chunk`` sizes."""
    return cut(dim, chunks(size, ranks))


def fused(dim: int, parts: Sequence[Sequence[Range]], widths: Sequence[int]) -> Cut:
    """Return the cut of a fused matrix; ``parts`` has each rank's range for each part, ``widths`` each part's width."""
    ranges: list[tuple[Range, ...]] = []
    starts = [sum(widths[:index]) for index in range(len(widths))]
    for rank in range(len(parts[0])):
        rank_parts = [(part[rank], at) for part, at in zip(parts, starts, strict=True)]
        ranges.append(tuple((start + at, stop + at) for (start, stop), at in rank_parts if stop > start))
    return Cut(dim=dim, ranges=tuple(ranges))


def along(axis_of: Sequence[int], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return each rank's range: the entry of ``ranges`` at the rank's index on a mesh axis (``axis_of``)."""
    return tuple(ranges[place] for place in axis_of)


def collapsed_name(name: str) -> str:
    """Return the name with ``*`` for every number in it: ``layers.3.ffn.up.weight`` → ``layers.*.ffn.up.weight``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def collapse(rows: Iterable[Partition]) -> tuple[Partition, ...]:
    """Merge the :class:`Partition` rows of parameters whose names differ only in numbers, if all these rows are equal.

    A row in ``rows`` may already stand for several parameters.
    """
    groups: dict[str, list[Partition]] = {}
    for row in rows:
        groups.setdefault(collapsed_name(row.name), []).append(row)
    collapsed: list[Partition] = []
    for name, group in groups.items():
        one = {"name": name, "count": 1}
        first = group[0].model_copy(update=one)
        alike = all(row.model_copy(update=one) == first for row in group[1:])
        collapsed += [first.model_copy(update={"count": sum(row.count for row in group)})] if alike else group
    return tuple(collapsed)


def by_name(rows: Iterable[Partition], names: Iterable[str]) -> dict[str, Partition]:
    """Return full name → entry of the collapsed ``rows``, for each of the parameters ``names`` that has an entry."""
    by_row_name: Mapping[str, Partition] = {row.name: row for row in rows}
    entries = {}
    for name in names:
        row = by_row_name.get(name) or by_row_name.get(collapsed_name(name))
        if row is not None:
            entries[name] = row
    return entries

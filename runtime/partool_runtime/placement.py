"""Position of this rank's part of a parameter in the whole parameter.

Filling, gradient norm, optimizer, checkpoint and export all read this position. FSDP2 shards rows of the rank's part
over the data-parallel ranks. Every other cut (tensor parallelism) is described here and not by DTensor: DTensor
supports no ranges of a fused matrix, and no heads that several ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from partool.layout.tensor import Range


class Box(NamedTuple):
    """A contiguous block of the whole parameter that this rank holds."""

    local: tuple[slice, ...]
    """Offsets of the block in the rank's part."""
    offsets: tuple[int, ...]
    """Offsets of the block in the whole parameter."""
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a parameter that one rank holds, before it is sharded over data-parallel ranks."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    spans: tuple[tuple[Range, ...], ...]
    """For each dimension, the index ranges of the whole parameter that this rank holds, in the order of storage."""
    counts: bool = True
    """Whether this rank counts the values in norms and saves them; False if another tensor rank does so instead."""
    shared_by: tuple[int, ...] = ()
    """Group indices of the tensor ranks, including this one, that sum their parts of the gradient; empty if none."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.spans)

    def boxes(self, rows: range | None = None) -> Iterator[Box]:
        """Yield the blocks that form the rows ``rows`` of this rank's part (None means all rows).

        Local positions count from the first of these rows.
        """
        if not self.shape:
            yield Box((), (), ())
            return
        rows = range(self.local_shape[0]) if rows is None else rows
        per_dim = [list(_pieces(self.spans[0], rows)), *(list(_pieces(ranges, None)) for ranges in self.spans[1:])]
        for combination in product(*per_dim):
            sizes = tuple(stop - start for _, (start, stop) in combination)
            if prod(sizes):
                local = tuple(slice(at, at + size) for (at, _), size in zip(combination, sizes, strict=True))
                yield Box(local, tuple(start for _, (start, _) in combination), sizes)


def full_placement(shape: Sequence[int]) -> Placement:
    """Return the placement of a parameter that is not cut."""
    return Placement(tuple(shape), tuple(((0, size),) for size in shape))


def _pieces(ranges: Sequence[Range], window: range | None) -> Iterator[tuple[int, Range]]:
    """Yield (position in ``window``, index range in the whole parameter) of each of ``ranges`` within ``window``."""
    at = 0
    for start, stop in ranges:
        length = stop - start
        first, last = (at, at + length) if window is None else (max(at, window.start), min(at + length, window.stop))
        if first < last:
            yield first - (window.start if window is not None else 0), (start + first - at, start + last - at)
        at += length

"""Buckets: pieces of parameters whose gradients are copied, and whose states are updated, together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 2**16
"""Number of elements of a block. Squares are summed per block, and shards are cut only between blocks, so that the sums
do not depend on the cuts.
"""
ALIGNED = 2**11
"""Shards begin at multiples of this number of elements. With two or more bytes per element, these multiples are whole
pages, as direct I/O requires.
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A piece of a parameter's shard."""

    name: str
    start: int
    """Number of elements before the piece in the flat shard; a multiple of :data:`BLOCK`."""
    offset: int
    """Number of elements before the piece in the bucket."""
    elements: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces of shards, contiguous in host memory and sorted by the order in which their gradients are expected."""

    index: int
    first: int
    """Number of elements in all previous buckets; the buckets of a rank form one flat array."""
    members: tuple[Member, ...]

    @property
    def elements(self) -> int:
        """Number of elements of all members and of the gaps after them; a multiple of :data:`ALIGNED`."""
        last = self.members[-1]
        return _aligned(last.offset + last.elements)


def fill_buckets(shards: Iterable[tuple[str, int]], most_elements: int) -> list[Bucket]:
    """Distribute ``shards`` (name, number of elements) to buckets of at most ``most_elements`` elements.

    ``most_elements`` is at least :data:`BLOCK`. Shards are given in the order in which their gradients are expected. A
    shard begins at a multiple of :data:`ALIGNED`
    and is contiguous in the flat array, even if it continues in the next bucket: shards are cut at multiples of
    :data:`BLOCK`. Shards without elements are in no bucket.
    """
    if most_elements < BLOCK:
        raise ValueError(f"a bucket of {most_elements} elements is smaller than a block of {BLOCK}")
    most_elements -= most_elements % ALIGNED
    buckets: list[Bucket] = []
    members: list[Member] = []
    first = filled = 0
    for name, elements in shards:
        start = 0
        while start < elements:
            remaining, room = elements - start, most_elements - filled
            taken = remaining if remaining <= room else room - room % BLOCK
            if taken == 0:
                buckets.append(Bucket(len(buckets), first, tuple(members)))
                first, filled, members = first + filled, 0, []
                continue
            members.append(Member(name, start, filled, taken))
            filled, start = filled + _aligned(taken), start + taken
    if members:
        buckets.append(Bucket(len(buckets), first, tuple(members)))
    return buckets


def places(buckets: Iterable[Bucket]) -> dict[str, int]:
    """Return the offset in elements of each shard in the flat array of all buckets, by the shard's name."""
    return {m.name: bucket.first + m.offset for bucket in buckets for m in bucket.members if m.start == 0}


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNED) * ALIGNED

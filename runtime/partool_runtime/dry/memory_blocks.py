"""Blocks of device memory and their lists, for the model of torch's caching allocator.

The names in the docstrings are functions and constants of ``c10/cuda/CUDACachingAllocator.cpp``
(https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp); torch 2.13 has the constants in
``c10/core/AllocatorConfig.h``.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIN_BLOCK_BYTES = 512
"""Sizes are multiples of this (``kMinBlockSize``, ``round_size``)."""
SMALL_SIZE_BYTES = 1 << 20
"""Largest request of the small pool (``kSmallSize``, ``get_pool``); without expandable segments also the largest
remainder that a block of the large pool keeps (``should_split``)."""
SMALL_BUFFER_BYTES = 2 << 20
"""Segment of the small pool, and unit in which an expandable segment of that pool grows (``kSmallBuffer``)."""
LARGE_BUFFER_BYTES = 20 << 20
"""Segment for large requests below :data:`MIN_LARGE_ALLOC_BYTES`, and unit in which an expandable segment of the large
pool grows (``kLargeBuffer``, in later versions the default of ``large_segment_size``)."""
MIN_LARGE_ALLOC_BYTES = 10 << 20
"""Smallest request with a segment of its own size (``kMinLargeAlloc``, ``get_allocation_size``)."""
ROUND_LARGE_BYTES = 2 << 20
"""The size of such a segment is a multiple of this (``kRoundLarge``)."""

ADDRESS_BITS = 80
"""Sort keys of free blocks are ``(size << ADDRESS_BITS) + address``: integers compare faster than pairs."""
FREE, ALLOCATED, UNMAPPED, EMPTY = range(4)
"""States of a block. An unmapped block has addresses without memory, the empty one stands for requests of 0 bytes."""


class MemoryBlock:
    """A part of a segment. It is the handle of an allocation; once it is free, another allocation may get it."""

    __slots__ = ("address", "following", "pool", "previous", "size_bytes", "state")

    def __init__(
        self,
        address: int,
        size_bytes: int,
        pool: BlockPool,
        previous: MemoryBlock | None = None,
        following: MemoryBlock | None = None,
    ) -> None:
        self.address = address
        """Virtual address in bytes; no two segments overlap."""
        self.size_bytes = size_bytes
        self.pool = pool
        self.previous = previous
        """The block before this one in the segment."""
        self.following = following
        """The block after this one in the segment."""
        self.state = FREE

    def split(self, size_bytes: int) -> MemoryBlock:
        """Cut the first ``size_bytes`` off and return them as a free block."""
        front = MemoryBlock(self.address, size_bytes, self.pool, self.previous, self)
        if front.previous is not None:
            front.previous.following = front
        self.previous = front
        self.address += size_bytes
        self.size_bytes -= size_bytes
        return front

    def absorb(self, neighbour: MemoryBlock) -> None:
        """Extend the block by a neighbour, which is in no list any more (``try_merge_blocks``)."""
        if neighbour is self.previous:
            self.address = neighbour.address
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.following = self
        else:
            self.following = neighbour.following
            if self.following is not None:
                self.following.previous = self
        self.size_bytes += neighbour.size_bytes


class BlockPool:
    """The free and the unmapped blocks of one stream, for small or for large requests."""

    __slots__ = ("free", "granule_bytes", "keys", "least_rest_bytes", "unmapped")

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.keys: list[int] = []
        """Sort keys of the free blocks, ascending: by size, then by address (``BlockComparatorSize``)."""
        self.free: dict[int, MemoryBlock] = {}
        """The free blocks by sort key."""
        self.unmapped: list[MemoryBlock] = []
        """The unmapped blocks by address (``BlockComparatorAddress``)."""
        self.granule_bytes = SMALL_BUFFER_BYTES if small else LARGE_BUFFER_BYTES
        # should_split: the remainder is at least kMinBlockSize, or it is greater than kSmallSize
        self.least_rest_bytes = MIN_BLOCK_BYTES if small or expandable else SMALL_SIZE_BYTES + MIN_BLOCK_BYTES

    def put(self, block: MemoryBlock) -> None:
        """Add a free block, after it has absorbed its free neighbours."""
        neighbour = block.previous
        if neighbour is not None and neighbour.state == FREE:
            self.take(neighbour)
            block.absorb(neighbour)
        neighbour = block.following
        if neighbour is not None and neighbour.state == FREE:
            self.take(neighbour)
            block.absorb(neighbour)
        self.add(block)

    def add(self, block: MemoryBlock) -> None:
        """Add a free block without free neighbours."""
        key = (block.size_bytes << ADDRESS_BITS) + block.address
        insort(self.keys, key)
        self.free[key] = block

    def take(self, block: MemoryBlock) -> None:
        """Remove a free block, whose size and address have not changed since it was added."""
        key = (block.size_bytes << ADDRESS_BITS) + block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.free[key]

    def put_unmapped(self, block: MemoryBlock) -> None:
        """Add an unmapped block, after it has absorbed its unmapped neighbours; drop a segment that has no memory."""
        for neighbour in (block.previous, block.following):
            if neighbour is not None and neighbour.state == UNMAPPED:
                self.unmapped.remove(neighbour)
                block.absorb(neighbour)
        if block.previous is not None or block.following is not None:
            insort(self.unmapped, block, key=lambda each: each.address)

    def fit(self, size: int) -> MemoryBlock | None:
        """Remove and return the free block that ``size`` bytes go to; None if no block is large enough.

        It is the smallest block, and the one with the lowest address among equals. A block that can grow counts with
        the size that it can grow to, as long as the next larger block is smaller than that (``get_free_block``).
        """
        keys, free = self.keys, self.free
        place = bisect_left(keys, size << ADDRESS_BITS)
        if place == len(keys):
            return None
        if _growth(free[keys[place]]):
            while place + 1 < len(keys) and _grown(free[keys[place + 1]]) < _grown(free[keys[place]]):
                place += 1
        return free.pop(keys.pop(place))


def _growth(block: MemoryBlock) -> int:
    """Return the bytes of the unmapped block after a block."""
    following = block.following
    return following.size_bytes if following is not None and following.state == UNMAPPED else 0


def _grown(block: MemoryBlock) -> int:
    return block.size_bytes + _growth(block)

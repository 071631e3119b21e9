"""A model of torch's caching allocator for CUDA: how many bytes it reserves for a sequence of allocations and frees.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings, with and without expandable
segments (https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp; settings:
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management). Names in brackets are functions of that file.

The model differs where the allocator depends on time or on the driver. ``Tensor.record_stream`` delays the reuse of
memory until another stream has passed a point; here a freed block can be used again at once. Segments have ascending
addresses here, so that among free blocks of equal size the allocator may choose another one. The private pools of CUDA
graphs and the settings ``max_split_size_mb``, ``roundup_power2_divisions`` and ``garbage_collection_threshold`` are not
modelled.
"""

from __future__ import annotations

from partool_runtime.dry.memory_blocks import (
    ALLOCATED,
    EMPTY,
    FREE,
    LARGE_BUFFER_BYTES,
    MIN_BLOCK_BYTES,
    MIN_LARGE_ALLOC_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_SIZE_BYTES,
    UNMAPPED,
    BlockPool,
    MemoryBlock,
)

_UNLIMITED_BYTES = 1 << 60
"""Virtual addresses of an expandable segment on a device without a limit."""


class DeviceFull(Exception):  # noqa: N818 - a state of the modelled device, not a fault of partool
    """A request does not fit on the device, even after all unused segments were released."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        usage = f"{allocated_bytes} bytes are allocated, {reserved_bytes} bytes reserved"
        super().__init__(f"{requested_bytes} bytes do not fit on the device: {usage}")
        self.requested_bytes = requested_bytes
        """Bytes of the request, not rounded."""
        self.allocated_bytes = allocated_bytes
        """Bytes of the allocated blocks without the request."""
        self.reserved_bytes = reserved_bytes
        """Bytes that stay reserved after unused segments were released."""


class CachingAllocator:
    """The caching allocator of one device.

    The figures count bytes of blocks, as ``torch.cuda.memory_allocated`` and ``torch.cuda.memory_reserved`` do; a block
    can be larger than the request.
    """

    def __init__(self, *, expandable: bool, capacity_bytes: int | None = None) -> None:
        """Start without memory.

        ``expandable`` is torch's setting ``expandable_segments``. At most ``capacity_bytes`` can be reserved; None is
        no limit.
        """
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._expandable = expandable
        self._capacity_bytes = capacity_bytes
        self._pools: dict[int, tuple[BlockPool, BlockPool]] = {}
        self._next_address = 0
        self._nothing = MemoryBlock(0, 0, BlockPool(small=True, expandable=expandable))
        self._nothing.state = EMPTY

    def allocate(self, size_bytes: int, stream: int = 0) -> MemoryBlock:
        """Return a block for a request of ``size_bytes`` on ``stream``; :meth:`free` takes it back (``malloc``).

        A request of 0 bytes takes no memory. Raises DeviceFull if more than the capacity would be reserved.
        """
        if size_bytes <= 0:
            return self._nothing
        size = (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        pools = self._pools.get(stream) or self._new_pools(stream)
        pool = pools[size > SMALL_SIZE_BYTES]
        block = pool.fit(size) or self._reserve(pool, size, size_bytes)
        if block.size_bytes - size >= pool.least_rest_bytes:
            rest, block = block, block.split(size)
            pool.add(rest)
        block.state = ALLOCATED
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Take back a block of :meth:`allocate`; raises ValueError if it is free already (``free_block``)."""
        if block.state == ALLOCATED:
            self.allocated_bytes -= block.size_bytes
            block.state = FREE
            block.pool.put(block)
        elif block.state != EMPTY:
            raise ValueError("the block is free already")

    def empty_cache(self) -> None:
        """Release segments without allocated blocks, or whole units of expandable ones (``release_cached_blocks``)."""
        for pools in self._pools.values():
            for pool in pools:
                for block in list(pool.free.values()):
                    if self._expandable:
                        self._unmap(block)
                    elif block.previous is None and block.following is None:
                        pool.take(block)
                        self.reserved_bytes -= block.size_bytes

    def _new_pools(self, stream: int) -> tuple[BlockPool, BlockPool]:
        """Return the new pools of a stream for small and for large requests."""
        small, large = (BlockPool(small=small, expandable=self._expandable) for small in (True, False))
        self._pools[stream] = small, large
        return small, large

    def _reserve(self, pool: BlockPool, size: int, requested_bytes: int) -> MemoryBlock:
        """Return a block of at least ``size`` bytes with new memory (``alloc_block``)."""
        extend = self._expand if self._expandable else self._new_segment
        block = extend(pool, size)
        if block is None:
            self.empty_cache()
            block = extend(pool, size)
        if block is None:
            raise DeviceFull(requested_bytes, self.allocated_bytes, self.reserved_bytes)
        return block

    def _new_segment(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a new segment; None if it does not fit on the device (``get_allocation_size``)."""
        segment_bytes = pool.granule_bytes
        if size >= MIN_LARGE_ALLOC_BYTES:
            segment_bytes = _up(size, ROUND_LARGE_BYTES)
        if not self._grow(segment_bytes):
            return None
        return MemoryBlock(self._new_range(segment_bytes), segment_bytes, pool)

    def _expand(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Give an expandable segment as much new memory as a block of ``size`` bytes needs, and return the block.

        Returns None if the memory does not fit on the device (``try_allocate_expandable_block``).
        """
        block: MemoryBlock | None = self._room(pool, size)
        if block is not None and block.state == UNMAPPED:
            block = self._map(block, min(block.size_bytes, size))
        while block is not None and block.size_bytes < size:
            following = block.following
            # The next block has no memory: two free blocks side by side would be one.
            block = following and self._map(following, min(size - block.size_bytes, following.size_bytes))
        if block is not None:
            pool.take(block)
        return block

    def _room(self, pool: BlockPool, size: int) -> MemoryBlock:
        """Return the first of the neighbouring free and unmapped blocks that have ``size`` bytes together.

        It has the lowest address possible; a new segment is begun if there are no such blocks
        (``find_expandable_block``).
        """
        for unmapped in pool.unmapped:
            before = unmapped.previous
            first = before if before is not None and before.state == FREE else unmapped
            room_bytes = 0
            block: MemoryBlock | None = first
            while room_bytes < size and block is not None and block.state != ALLOCATED:
                room_bytes += block.size_bytes
                block = block.following
            if room_bytes >= size:
                return first
        limit = _UNLIMITED_BYTES if self._capacity_bytes is None else self._capacity_bytes
        # Addresses for 1 1/8 of the device, so that memory can move behind blocks that stay.
        range_bytes = _up(limit + limit // 8, pool.granule_bytes)
        segment = MemoryBlock(self._new_range(range_bytes), range_bytes, pool)
        segment.state = UNMAPPED
        pool.unmapped.append(segment)
        return segment

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
        """Give memory to at least the first ``size`` bytes of an unmapped block and return them as a free block.

        It is merged with its free neighbours. Returns None if the memory does not fit on the device (``map_block``).
        """
        pool = block.pool
        mapped_bytes = _up(size, pool.granule_bytes)
        if not self._grow(mapped_bytes):
            return None
        if mapped_bytes < block.size_bytes:
            block = block.split(mapped_bytes)  # the rest stays in the list of unmapped blocks, at the same place
        else:
            pool.unmapped.remove(block)
            block.state = FREE
        pool.put(block)
        return block

    def _unmap(self, block: MemoryBlock) -> None:
        """Release the whole units of memory in a free block of an expandable segment (``unmap_block``)."""
        pool = block.pool
        begin = _up(block.address, pool.granule_bytes)
        end = (block.address + block.size_bytes) // pool.granule_bytes * pool.granule_bytes
        if begin >= end:
            return
        pool.take(block)
        before = block.split(begin - block.address) if begin > block.address else None
        rest = block.address + block.size_bytes - end
        after, block = (block, block.split(end - begin)) if rest else (None, block)
        block.state = UNMAPPED
        for part in (before, after):
            if part is not None:
                pool.put(part)
        pool.put_unmapped(block)
        self.reserved_bytes -= end - begin

    def _grow(self, size: int) -> bool:
        """Reserve ``size`` more bytes; return False if they do not fit on the device."""
        if self._capacity_bytes is not None and self.reserved_bytes + size > self._capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_range(self, size: int) -> int:
        """Return the first address of ``size`` new ones; it is a multiple of every unit."""
        address = self._next_address
        self._next_address = _up(address + size, LARGE_BUFFER_BYTES)
        return address


def _up(value: int, unit: int) -> int:
    """Return ``value`` rounded up to a multiple of ``unit``."""
    return -(-value // unit) * unit

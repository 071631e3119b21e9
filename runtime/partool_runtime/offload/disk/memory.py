"""Layout of buckets in the file, and the memory into which buckets are loaded."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from partool_runtime.offload.buckets import Bucket
from partool_runtime.offload.disk import problems
from partool_runtime.offload.disk.file import IO_BYTES, FileBlock


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """A block of a bucket, and the block's place in a slot's memory."""

    block: FileBlock
    offset: int


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one bucket."""

    memory: memoryview
    tensors: tuple[torch.Tensor, ...]
    """One tensor per role (master or a moment); each tensor has the size of the largest bucket."""
    bucket: int = -1
    """Index of the bucket in the slot; -1 if the slot is empty."""
    users: int = 0
    moving: int = 0
    """Number of transfers in flight to or from the slot."""
    reading: bool = False
    used_at: int = 0

    @property
    def idle(self) -> bool:
        """True if another bucket may be loaded into the slot."""
        return self.users == 0 and self.moving == 0


@dataclass(slots=True)
class DiskTraffic:
    """Traffic to and from the disk so far."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited: int = 0
    """Number of requests for buckets that were not in memory yet."""


def lay_out(buckets: Sequence[Bucket], dtypes: Sequence[torch.dtype]) -> tuple[list[list[SlotBlock]], int]:
    """Cut buckets into blocks; return the blocks of each bucket, and the size of the file in bytes.

    The file has one region per role, which holds all buckets in order. A slot's memory has one region per role, which
    holds one bucket.
    """
    total = max((bucket.first + bucket.elements for bucket in buckets), default=0)
    most = max((bucket.elements for bucket in buckets), default=0)
    blocks: list[list[SlotBlock]] = []
    index = 0
    for bucket in buckets:
        stretches, region, slot_bytes = [], 0, 0
        for dtype in dtypes:
            place, length = region + bucket.first * dtype.itemsize, bucket.elements * dtype.itemsize
            for begin in range(0, length, IO_BYTES):
                block = FileBlock(index, place + begin, min(IO_BYTES, length - begin))
                stretches.append(SlotBlock(block, slot_bytes + begin))
                index += 1
            region, slot_bytes = region + total * dtype.itemsize, slot_bytes + most * dtype.itemsize
        blocks.append(stretches)
    return blocks, sum(total * dtype.itemsize for dtype in dtypes)


def make_slots(count: int, elements: int, dtypes: Sequence[torch.dtype]) -> list[Slot]:
    """Allocate memory for ``count`` buckets of up to ``elements`` elements; raises ConfigurationError PT674."""
    size_bytes = elements * sum(dtype.itemsize for dtype in dtypes)
    try:
        return [_slot(elements, dtypes, size_bytes) for _ in range(count)] if size_bytes else []
    except (OSError, MemoryError) as error:
        raise problems.no_memory(error, count, size_bytes) from error


def _slot(elements: int, dtypes: Sequence[torch.dtype], size_bytes: int) -> Slot:
    # Direct transfers need whole pages. These are not pinned: no device reads them, and the system pins the pages of
    # a transfer while it runs.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork, such as for a data loader's workers, a running transfer could write to the child's copy of a page.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    tensors, place = [], 0
    for dtype in dtypes:
        tensors.append(torch.frombuffer(memory, dtype=dtype, count=elements, offset=place))
        place += elements * dtype.itemsize
    return Slot(memoryview(memory), tuple(tensors))

"""Host memory that devices copy to and from, in slabs of one size that are used again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from partool_runtime.offload.lanes import Mark
from partool_runtime.offload.memory import HostMemory

SLAB_BYTES = 2**26
"""A power of two, as PyTorch's allocator of pinned memory rounds up to: of other sizes up to half is lost."""


@dataclass(slots=True, eq=False)
class Lent:
    """Slabs that belong together, and what still copies from them."""

    slabs: list[torch.Tensor]
    mark: Mark | None = None
    """Behind the copy from them that was started last."""
    reads: torch.Tensor | None = None
    """Where that copy goes; kept as long as it may be on its way."""


class Slabs:
    """Lends host memory and takes it back. Takes none from its owner but slabs that are missing."""

    def __init__(self, memory: HostMemory, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._memory, self._slab_bytes = memory, slab_bytes
        self._free: list[Lent] = []
        """One slab each."""
        self.made = 0
        """Slabs there are, in use or not."""

    @property
    def held_bytes(self) -> int:
        """Host memory that is held, in use or not."""
        return self.made * self._slab_bytes

    @property
    def used_bytes(self) -> int:
        """Of this, what is in use."""
        return (self.made - len(self._free)) * self._slab_bytes

    def reserve(self, size_bytes: int) -> None:
        """Have slabs for so many bytes in all, before the first collective; see :class:`HostMemory`."""
        missing = -(-size_bytes // self._slab_bytes) - self.made
        self._free = [Lent([self._made()]) for _ in range(missing)] + self._free

    def take(self, size_bytes: int) -> Lent:
        """Lend slabs, uint8, that together hold so many bytes. Compute's next work is behind the copies from them."""
        slabs = []
        for _ in range(0, size_bytes, self._slab_bytes):
            if not self._free:
                slabs.append(self._made())
                continue
            free = self._free.pop()
            if free.mark is not None:
                free.mark.before_compute()
            slabs += free.slabs
        return Lent(slabs)

    def give_back(self, lent: Lent) -> None:
        """Take slabs back. Copies from them may still be on their way, and copies to them on one lane."""
        self._free += [Lent([slab], lent.mark, lent.reads) for slab in lent.slabs]

    def beside(self, memory: torch.Tensor, lent: Lent) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of a memory, uint8, each with the slab, cut to its size, that it goes to or comes from."""
        for start, slab in zip(range(0, len(memory), self._slab_bytes), lent.slabs, strict=True):
            part = memory[start : start + self._slab_bytes]
            yield part, slab[: len(part)]

    def _made(self) -> torch.Tensor:
        self.made += 1
        return self._memory.take(self._slab_bytes, "activations")

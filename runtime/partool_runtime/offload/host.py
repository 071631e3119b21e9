"""Host memory that devices copy to and from, in slabs of one size that are used again and again."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SLAB_BYTES = 2**26
"""A power of two, as PyTorch's allocator of pinned memory rounds up to: of other sizes up to half is lost."""


class Slabs:
    """Takes and gives back host memory; pinned where a device is to reach it by itself."""

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned, self._slab_bytes = pinned, slab_bytes
        self._free: list[torch.Tensor] = []
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

    def take(self, size_bytes: int) -> list[torch.Tensor]:
        """Return slabs, uint8, that together hold so many bytes."""
        return [self._free.pop() if self._free else self._made() for _ in range(0, size_bytes, self._slab_bytes)]

    def give_back(self, slabs: list[torch.Tensor]) -> None:
        """Take slabs back that nothing reads any more but copies that were started before."""
        self._free += slabs

    def beside(self, memory: torch.Tensor, slabs: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of a memory, uint8, each with the slab, cut to its size, that it goes to or comes from."""
        for start, slab in zip(range(0, len(memory), self._slab_bytes), slabs, strict=True):
            part = memory[start : start + self._slab_bytes]
            yield part, slab[: len(part)]

    def _made(self) -> torch.Tensor:
        self.made += 1
        with torch.inference_mode(False):
            return torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)

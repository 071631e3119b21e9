"""Host memory for copies to and from devices, in reused slabs of one size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from partool_runtime.offload.lanes import Mark
from partool_runtime.offload.memory import HostMemory
from partool_runtime.torch_internals.tensors import storage_key

SLAB_BYTES = 2**26
"""Bytes of a slab; a power of two, since PyTorch's pinned allocator rounds up to powers of two and could waste half."""


_CUTS = 6
"""Largest number of times that a slab is halved, to :data:`partool_runtime.offload.activations.LEAST_BYTES` bytes."""


@dataclass(slots=True, eq=False)
class Lent:
    """Slabs that are lent in one request, and the latest copy that reads the slabs."""

    slabs: list[torch.Tensor]
    mark: Mark | None = None
    """Mark after the latest copy from the slabs."""
    reads: torch.Tensor | None = None
    """Target of the latest copy from the slabs; kept alive while the copy may be in flight."""


class Slabs:
    """Lends slabs of host memory and takes them back; it allocates new slabs only if none is free.

    A request smaller than a slab gets a half of a slab, a quarter, and so on. Slabs are cut on demand. Pieces are
    merged again only if no whole slab is free, since steps mostly request the same sizes.
    """

    def __init__(self, memory: HostMemory, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._memory, self._slab_bytes = memory, slab_bytes
        self._slabs: list[torch.Tensor] = []
        self._free: list[list[Lent]] = [[] for _ in range(_CUTS + 1)]
        """Free slabs and pieces, by the number of halvings."""
        self.made = 0
        """Number of allocated slabs, in use or not."""
        self.used_bytes = 0
        """Bytes in use, counted in whole pieces and slabs."""

    @property
    def held_bytes(self) -> int:
        """Bytes of allocated host memory, both lent and free."""
        return self.made * self._slab_bytes

    def reserve(self, size_bytes: int) -> None:
        """Allocate slabs for a total of ``size_bytes``, before the first collective; see :class:`HostMemory`."""
        while self.held_bytes < size_bytes:
            self._free[0].append(Lent([self._made()]))

    def take(self, size_bytes: int) -> Lent:
        """Lend uint8 slabs of ``size_bytes`` in total; compute queued later waits for earlier copies from the slabs."""
        slabs = []
        for start in range(0, size_bytes, self._slab_bytes):
            free = self._piece(self._cuts(size_bytes - start))
            if free.mark is not None:
                free.mark.before_compute()
            slabs += free.slabs
        self.used_bytes += sum(map(len, slabs))
        return Lent(slabs)

    def _cuts(self, size_bytes: int) -> int:
        """Return how many times a slab can be halved so that a piece still holds ``size_bytes``."""
        fits = (cuts for cuts in range(_CUTS, 0, -1) if size_bytes <= self._slab_bytes >> cuts)
        return next(fits, 0)

    def _piece(self, cuts: int) -> Lent:
        if self._free[cuts]:
            return self._free[cuts].pop()
        if cuts == 0:
            return self._joined() or Lent([self._made()])
        larger = self._piece(cuts - 1)
        size = self._slab_bytes >> cuts
        for half in (larger.slabs[0][:size], larger.slabs[0][size : 2 * size]):
            self._free[cuts].append(Lent([half], larger.mark, larger.reads))
        return self._free[cuts].pop()

    def _joined(self) -> Lent | None:
        """Find a slab whose pieces are all free, merge its pieces and return it; None if there is no such slab."""
        pieces = [piece for free in self._free[1:] for piece in free]
        for slab in self._slabs:
            free_pieces = [piece for piece in pieces if storage_key(piece.slabs[0]) == storage_key(slab)]
            if sum(len(piece.slabs[0]) for piece in free_pieces) == self._slab_bytes:
                for piece in free_pieces:
                    self._free[self._cuts(len(piece.slabs[0]))].remove(piece)
                    if piece.mark is not None:
                        piece.mark.before_compute()
                return Lent([slab])
        return None

    def give_back(self, lent: Lent) -> None:
        """Take slabs back. Copies from the slabs, and copies to the slabs on one lane, may still be in flight."""
        for slab in lent.slabs:
            self.used_bytes -= len(slab)
            self._free[self._cuts(len(slab))].append(Lent([slab], lent.mark, lent.reads))

    def beside(self, memory: torch.Tensor, lent: Lent) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Cut a uint8 tensor into parts of a slab's size; yield each part with the lent memory for its copy."""
        for start, slab in zip(range(0, len(memory), self._slab_bytes), lent.slabs, strict=True):
            part = memory[start : start + self._slab_bytes]
            yield part, slab[: len(part)]

    def _made(self) -> torch.Tensor:
        self.made += 1
        self._slabs.append(self._memory.take(self._slab_bytes, "activations"))
        return self._slabs[-1]

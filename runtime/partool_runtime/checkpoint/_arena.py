"""Copies of device tensors in host memory, made through two small blocks of pinned memory that every save uses."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from partool_runtime.errors import ConfigurationError
from partool_runtime.offload.lanes import Lanes, Mark, open_lanes
from partool_runtime.offload.memory import PAGE_BYTES, HostMemory

BLOCK_BYTES = 64 << 20
"""Size of a block; copies of this size run at the full rate of a host link (SuperOffload, arXiv 2509.21271)."""
_BLOCKS = 2
_LEAST_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Arena:
    """Blocks of host memory that a device copies into while the host empties the others into ordinary memory.

    A copy from a device straight into ordinary memory takes several times as long, and memory of the state's size that
    is pinned for a copy stays pinned, since pinning is too slow to repeat.
    """

    def __init__(self, device: torch.device, blocks: Sequence[Tensor], lanes: Lanes) -> None:
        """``blocks`` are flat uint8 tensors of equal size; ``lanes`` copy from ``device``."""
        self.device, self._blocks, self._lanes = device, blocks, lanes

    def copied(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return copies of tensors on the device in ordinary host memory; all copies are complete."""
        after, copies = self._lanes.now(), []
        in_flight: deque[tuple[Mark, Tensor, Tensor]] = deque()
        free = deque(self._blocks)
        for tensor in tensors:
            copies.append(torch.empty(tensor.shape, dtype=tensor.dtype))
            most = max(1, self._blocks[0].nbytes // tensor.itemsize)
            for part, target in zip(_parts(tensor, most), _parts(copies[-1], most), strict=True):
                if not free:
                    free.append(_emptied(*in_flight.popleft()))
                block = free.popleft()
                room = block[: part.nbytes].view(part.dtype).view(part.shape)
                in_flight.append((self._lanes.down.copy(room, part, after), block, target))
        while in_flight:
            _emptied(*in_flight.popleft())
        return copies

    def close(self) -> None:
        """End the lanes."""
        self._lanes.close()


def open_arena(device: torch.device, memory: HostMemory, room_bytes: int | None = None) -> Arena | None:
    """Return the arena for checkpoints of a device's state; None on a CPU, and where there is no room for blocks.

    ``room_bytes`` is the pinned memory that is not needed for anything else; None means that no limit is known. Where
    the system refuses to pin so much, there is no arena either: copies take longer then. Call this while no collective
    is in flight, as pinning waits for the device.
    """
    size = BLOCK_BYTES if room_bytes is None else min(BLOCK_BYTES, room_bytes // _BLOCKS // PAGE_BYTES * PAGE_BYTES)
    if device.type == "cpu" or size < _LEAST_BYTES:
        return None
    try:
        # One allocation, so that a refusal leaves nothing behind.
        blocks = torch.split(memory.take(_BLOCKS * size, "checkpoints"), size)
    except ConfigurationError as error:
        if error.code != "PT676":
            raise
        _log.warning("checkpoints are copied without pinned memory, which takes longer: %s", error.message)
        return None
    return Arena(device, blocks, open_lanes(device))


def _emptied(mark: Mark, block: Tensor, target: Tensor) -> Tensor:
    """Wait until a block is full, copy it to its target, and return the block."""
    mark.wait()
    target.copy_(block[: target.nbytes].view(target.dtype).view(target.shape))
    return block


def _parts(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Return views of at most ``most`` elements that make up a tensor; the order depends on its shape only."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    axis = next(at for at, size in enumerate(tensor.shape) if size > 1)
    each = max(1, most // math.prod(tensor.shape[axis + 1 :]))
    for piece in torch.split(tensor, each, dim=axis):
        yield from _parts(piece, most)

"""Parameters with shards in host memory or on a disk; shards are copied to the device before they are gathered.

FSDP2 begins to gather a unit while the previous unit computes. Before this gather, the unit's shards are copied on the
lane ``up`` into device memory, which is freed as soon as the gather has read it. So the device holds only gathered
parameters and the shards of units that are being gathered. Optimizer passes in host memory write new weights directly
into the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from partool.plan.layout import OffloadLayout
from partool_runtime.offload.lanes import Lanes, Mark, open_lanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.shards import DiskShardStore, MemoryShardStore, ShardStore
from partool_runtime.torch_internals.unit_shards import UnitShards, unit_shards

_ALIGNED_BYTES = 256
"""Alignment of shards in bytes, sufficient for all kernels that read shards."""


class HostParameters:
    """Owns the shards of a rank's parameters in host memory, or in a file if ``disk`` names its folder.

    The constructor replaces ``to_empty``: all tensors on the meta device get memory, shards in host memory, other
    tensors on ``device``. The constructor makes new parameters, so register hooks afterwards. A shard is accessed as
    the local part of its parameter. The parameter's device remains ``device``, so gradients are on ``device``. Shards
    may be written to between :meth:`settle` and :meth:`written`; a unit's shards may be written to as soon as the
    unit's gradients are complete.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        device: torch.device,
        *,
        memory: HostMemory,
        lanes: Lanes | None = None,
        disk: OffloadLayout | None = None,
        owner: str = "rank 0",
        shard_file: Callable[..., ShardStore] = DiskShardStore,
    ) -> None:
        """``shard_file`` opens the store on ``disk``, and takes the arguments of :class:`DiskShardStore`."""
        roots = list(roots)
        self._lanes = lanes or open_lanes(device)
        self._behind: Mark | None = None
        """Mark after compute's latest read of copied shards; the next copy starts after this mark."""
        self._units = [_Unit(self, index, shards) for index, shards in enumerate(unit_shards(roots, device))]
        sizes = [unit.size_bytes for unit in self._units]
        self._shard_store: ShardStore = (
            MemoryShardStore(sizes, memory, self._lanes)
            if disk is None
            else shard_file(sizes, disk, self._lanes, owner=owner)
        )
        self.notes = self._shard_store.notes
        """Notes for the run's log."""
        for unit, home in zip(self._units, self._shard_store.homes, strict=True):
            unit.move(home)
        for root in roots:
            _give_memory(root, device)
        self.written()
        self.moved_bytes = 0
        """Bytes copied to the device so far."""

    @property
    def held_bytes(self) -> int:
        """Bytes of shards in host memory or on a disk."""
        return sum(unit.size_bytes for unit in self._units)

    def begin(self) -> None:
        """Mark the start of a step's passes."""
        self._shard_store.begin()

    def settle(self) -> None:
        """Wait, after a step's passes, until nothing reads the shards any more; then the shards can be written to."""
        for unit in self._units:
            unit.settle()
        self._shard_store.settle()

    def written(self) -> None:
        """Store the new content of the shards; raises errors of earlier writes."""
        self._shard_store.written()

    def close(self) -> None:
        """End the lanes and free the shards' memory or file; earlier errors are not raised again."""
        self._shard_store.close()
        self._lanes.close()

    def bring(self, unit: int, size_bytes: int) -> tuple[torch.Tensor, Mark]:
        """Start to copy a unit's shards to the device; return their device memory and the mark after the copy."""
        room = self._lanes.room(size_bytes)
        self.moved_bytes += size_bytes
        return room, self._shard_store.fetch(unit, room, self._behind)

    def was_read(self) -> None:
        """Record that compute has read the copied shards."""
        self._behind = self._lanes.now()


class _Unit:
    """The parameters of one FSDP2 unit; one all-gather collects all of them."""

    def __init__(self, owner: HostParameters, index: int, shards: UnitShards) -> None:
        self._owner, self._index, self._shards = owner, index, shards
        self._sizes = shards.sizes
        self.size_bytes = sum(_aligned(elements * dtype.itemsize) for elements, dtype in self._sizes)
        self._room: torch.Tensor | None = None
        self._mark: Mark | None = None

    def move(self, home: torch.Tensor) -> None:
        """Move the shards into the memory ``home``."""
        self._shards.move(list(self._cut(home)))
        self._shards.watch(self._bring, self._ready, self._released)

    @property
    def lent(self) -> bool:
        """True if the unit's shards are on the device."""
        return self._room is not None

    def settle(self) -> None:
        """Wait until nothing reads the shards any more; also wait for a gather that no pass has waited for."""
        if self._mark is not None:
            self._mark.wait()
            self._mark = None
        if self._room is not None and not self._shards.waits:
            self._shards.put_back()
            self._released()

    def _bring(self) -> list[torch.Tensor]:
        self._room, self._mark = self._owner.bring(self._index, self.size_bytes)
        return list(self._cut(self._room))

    def _ready(self) -> None:
        if self._mark is not None:
            self._mark.before_compute()

    def _released(self) -> None:
        self._owner.was_read()
        self._room = None

    def _cut(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        first = 0
        for elements, dtype in self._sizes:
            size_bytes = elements * dtype.itemsize
            yield memory[first : first + size_bytes].view(dtype)
            first += _aligned(size_bytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _give_memory(root: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised memory on ``device`` for parameters that are not sharded; move buffers to ``device``."""
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)  # raises for a buffer without a value

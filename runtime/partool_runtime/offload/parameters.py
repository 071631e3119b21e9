"""Parameters whose shards are in host memory or on a disk: a unit's come to the device just before they are gathered.

FSDP2 begins to gather a unit while the one before computes. Here a copy on the lane up goes first, into memory that is
given back as soon as the gather has read it: on the device are the shards of the units that are being gathered, and
what is gathered. Optimizer passes in host memory write new weights straight into the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from partool.plan.layout import OffloadLayout
from partool_runtime.offload.lanes import Lanes, Mark, open_lanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.shards import DiskShardStore, MemoryShardStore, ShardStore
from partool_runtime.torch_internals.unit_shards import UnitShards, unit_shards

_ALIGNED_BYTES = 256
"""Where shards begin: what every kernel that reads them likes."""


class HostParameters:
    """Owns the shards of a rank's parameters in host memory, or in a file where ``disk`` names its folder.

    Takes the place of giving the sharded model memory: all that is still on the meta device gets some, shards here, the
    rest on ``device``. It makes new parameters, so hooks are to be registered behind it. A shard is reached as the
    local part of its parameter, which belongs to the device for all else: its gradient is there. Between
    :meth:`settle` and :meth:`written` shards may be written to, and those of a unit whose gradients are complete.
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
    ) -> None:
        roots = list(roots)
        self._lanes = lanes or open_lanes(device)
        self._behind: Mark | None = None
        """Behind the last use of what the lane has brought and was given back."""
        self._units = [_Unit(self, index, shards) for index, shards in enumerate(unit_shards(roots, device))]
        sizes = [unit.size_bytes for unit in self._units]
        self._shard_store: ShardStore = (
            MemoryShardStore(sizes, memory, self._lanes)
            if disk is None
            else DiskShardStore(sizes, disk, self._lanes, owner=owner)
        )
        self.notes = self._shard_store.notes
        """Notes for the run's log."""
        for unit, home in zip(self._units, self._shard_store.homes, strict=True):
            unit.move(home)
        for root in roots:
            _give_memory(root, device)
        self.written()
        self.moved_bytes = 0
        """To the device, so far."""

    @property
    def held_bytes(self) -> int:
        """Bytes in host memory or on a disk."""
        return sum(unit.size_bytes for unit in self._units)

    @property
    def lent_bytes(self) -> int:
        """Device memory of the shards that are being gathered now."""
        return sum(unit.size_bytes for unit in self._units if unit.lent)

    def begin(self) -> None:
        """Say that the passes of a step begin."""
        self._shard_store.begin()

    def settle(self) -> None:
        """Return when nothing reads shards any more, so that they can be written to; behind the passes of a step."""
        for unit in self._units:
            unit.settle()
        self._shard_store.settle()

    def written(self) -> None:
        """Take in what was written to shards; raises what went wrong on the way."""
        self._shard_store.written()

    def close(self) -> None:
        """End the lanes and give back what shards were kept in; does not raise what went wrong before."""
        self._shard_store.close()
        self._lanes.close()

    def bring(self, unit: int, size_bytes: int) -> tuple[torch.Tensor, Mark]:
        """Start to copy a unit's shards to the device."""
        there = self._lanes.room(size_bytes)
        self.moved_bytes += size_bytes
        return there, self._shard_store.fetch(unit, there, self._behind)

    def was_read(self) -> None:
        """Take note that compute has read what was brought."""
        self._behind = self._lanes.now()


class _Unit:
    """Parameters that are gathered together."""

    def __init__(self, owner: HostParameters, index: int, shards: UnitShards) -> None:
        self._owner, self._index, self._shards = owner, index, shards
        self._sizes = shards.sizes
        self.size_bytes = sum(_aligned(elements * dtype.itemsize) for elements, dtype in self._sizes)
        self._there: torch.Tensor | None = None
        self._mark: Mark | None = None

    def move(self, home: torch.Tensor) -> None:
        """Let the shards be in this memory from now on."""
        self._shards.move(list(self._cut(home)))
        self._shards.watch(self._bring, self._ready, self._done)

    @property
    def lent(self) -> bool:
        """Whether its shards are on the device."""
        return self._there is not None

    def settle(self) -> None:
        """Return when nothing reads the shards any more, a gather that nobody waited for included."""
        if self._mark is not None:
            self._mark.wait()
            self._mark = None
        if self._there is not None and not self._shards.waits:
            self._shards.put_back()
            self._done()

    def _bring(self) -> list[torch.Tensor]:
        self._there, self._mark = self._owner.bring(self._index, self.size_bytes)
        return list(self._cut(self._there))

    def _ready(self) -> None:
        if self._mark is not None:
            self._mark.before_compute()

    def _done(self) -> None:
        self._owner.was_read()
        self._there = None

    def _cut(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        first = 0
        for elements, dtype in self._sizes:
            size_bytes = elements * dtype.itemsize
            yield memory[first : first + size_bytes].view(dtype)
            first += _aligned(size_bytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _give_memory(root: nn.Module, device: torch.device) -> None:
    """Give memory on the device to parameters that are not sharded, whose content is anything; buffers go there."""
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)  # raises for one without a value

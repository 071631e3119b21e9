"""What a rank uses of its host: memory that devices copy to and from, threads, cores and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from partool_kernels.host import Pool
from partool_runtime.offload.cores import open_pool
from partool_runtime.offload.disk import DiskStore
from partool_runtime.offload.lanes import Lanes, open_lanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.shards import DiskShardStore, ShardStore
from partool_runtime.offload.store import StateStore
from partool_runtime.offload.worker import PassWorker, SerialWorker
from partool_runtime.parallel.expert.dispatch import Read, read_rows
from partool_runtime.parallel.weipipe.lanes import Lane


@dataclass(frozen=True, slots=True)
class HostParts:
    """The classes and functions by which a rank uses its host; a dry run replaces all of them."""

    memory: Callable[..., HostMemory] = HostMemory
    """Takes the arguments of :class:`HostMemory`."""
    lanes: Callable[[torch.device], Lanes] = open_lanes
    """Opens the lanes of a device, on which copies between device and host run."""
    pool: Callable[[int, int, torch.device], tuple[Pool, tuple[str, ...]]] = open_pool
    """Opens the threads of an optimizer in host memory; see :func:`open_pool`."""
    worker: Callable[[str], PassWorker] = SerialWorker
    """Starts the thread that calls the passes of an optimizer in host memory."""
    state_file: Callable[..., StateStore] = DiskStore
    """Takes the arguments of :class:`DiskStore`."""
    shard_file: Callable[..., ShardStore] = DiskShardStore
    """Takes the arguments of :class:`DiskShardStore`."""
    ring_lane: Callable[[str, torch.device], Lane] = Lane
    """Starts a lane of transfers between the ranks of a ring."""
    read_rows: Read = read_rows
    """Reads from the device how many rows go to the ranks that share experts."""

"""What a rank uses of its host: memory that devices copy to and from, threads, cores and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from partool_kernels.host import Pool
from partool_runtime.offload.disk import DiskStore
from partool_runtime.offload.lanes import Lanes, open_lanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.shards import DiskShardStore, ShardStore
from partool_runtime.offload.store import StateStore
from partool_runtime.offload.worker import PassWorker, SerialWorker
from partool_runtime.parallel.expert.dispatch import Read, read_rows
from partool_runtime.parallel.weipipe.lanes import Lane


def open_pool(threads: int, per_node: int, device: torch.device) -> tuple[Pool, tuple[str, ...]]:
    """Return the optimizer's pool of threads, at most one thread per core, and notes for the run's log.

    Training runs on the first of this rank's cores. The optimizer's threads run on the other cores, one per core.
    Without an accelerator the cores are not split: training and the optimizer use all cores at different times.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if device.type == "cpu":
        rank_cores = allowed
        pool = Pool(min(threads, len(allowed)))
    else:
        # Ranks may be bound to memory nodes; their parent process is not, so it may use all cores of the machine.
        machine = max(len(allowed), len(os.sched_getaffinity(os.getppid())))
        place = int(os.environ.get("LOCAL_RANK", "0"))
        training, optimizer = split_cores(allowed, per_node, place, threads, machine)
        rank_cores = [*training, *optimizer]
        pool = Pool(max(1, len(optimizer)), optimizer)
        if training:
            os.sched_setaffinity(0, training)
    if pool.threads == threads:
        return pool, ()
    had = f"this rank has {len(rank_cores)} of its own" if rank_cores else "this rank has none to itself"
    return pool, (f"the plan has {threads} cores for the update, and {had}: threads that update: {pool.threads}",)


def split_cores(
    allowed: Sequence[int], per_node: int, local_rank: int, threads: int, machine: int
) -> tuple[list[int], list[int]]:
    """Return a rank's cores for training and its cores for the optimizer; ranks share no core.

    The node has ``machine`` cores. ``allowed`` lists the cores that the rank may use; ranks bound to one memory node
    have equal lists. With fewer than ``threads`` + 1 cores, training keeps two cores if possible. Both returned lists
    are empty if there are too few cores to split.
    """
    sharers = max(1, -(-per_node * len(allowed) // machine))
    each = len(allowed) // sharers
    if each < 2:
        return [], []
    if each <= threads:
        threads = max(1, each - 2)
    first = local_rank % sharers * each
    rank_cores = list(allowed[first : first + each])
    return rank_cores[:-threads], rank_cores[-threads:]


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

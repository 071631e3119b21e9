"""The cores of a rank: some for training, some for the optimizer in host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from partool_kernels.host import Pool


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

"""The process group, device and device meshes of a rank, built from the plan and passed around explicitly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError
from partool_runtime.torch_internals.collectives import in_memory_store

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this rank among the others."""

    rank: int
    world_size: int
    device: torch.device
    state: DeviceMesh
    """Axis ``dp_replicate`` over the copies of the training state, and axis ``dp_shard`` over the ranks that share one
    copy. Ranks that share sequences also share a copy."""
    dp: DeviceMesh
    """Axis ``dp``: the data-parallel ranks with this rank's pipeline position, in the order of the data axes."""
    pp: DeviceMesh
    """Axis ``pp``: the ranks of one pipeline, which share their data."""
    tp: DeviceMesh
    """Axis ``tp``: the ranks that share every matrix and their data."""
    cp: DeviceMesh
    """Axis ``cp``: the ranks that share sequences; the tensor axis lies inside this axis."""
    tp2: DeviceMesh
    """Axes ``tp0`` and ``tp1`` over the tensor ranks. Without two-dimensional tensor parallelism, ``tp0`` covers all
    tensor ranks and ``tp1`` has size 1."""

    @property
    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, in pipeline order; the first list contains rank 0."""
        others = self.world_size // self.pp.size()
        return [list(range(first, self.world_size, others)) for first in range(others)]

    @property
    def replicas(self) -> int:
        """Number of copies of the training state, over all ranks."""
        return self.state.size(0)

    @property
    def world(self) -> dist.ProcessGroup:
        """The group of all ranks, for global agreement."""
        group = dist.group.WORLD
        assert group is not None, "the process group was left"
        return group

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        dist.barrier()


def open_ranks(plan: Plan, timeout: timedelta = COLLECTIVE_TIMEOUT) -> Ranks:
    """Join the process group that the environment describes and lay the plan's mesh over it.

    Without ``WORLD_SIZE`` in the environment the world has one rank. Raises :class:`ConfigurationError` (PT510) if the
    plan is for another number of ranks, or (PT513) for accelerators that are missing.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    planned = plan.layout.mesh.world_size
    if world_size != planned:
        raise ConfigurationError("PT510", f"the plan is for {planned} ranks, but {world_size} were started")
    device = _device(plan.devices.backend)
    backend = "gloo" if device.type == "cpu" else "nccl"
    # With a device NCCL connects at once, so errors appear here and not in the first step.
    bound = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    else:
        store = in_memory_store()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
    return build_ranks(plan, device)


def build_ranks(plan: Plan, device: torch.device) -> Ranks:
    """Lay the plan's axes over the current process group; the pipeline axis is outermost, the tensor axis innermost.

    Ranks that share sequences have the same parameters, so they also share one copy of the training state. ZeRO-0 keeps
    a whole copy of the training state on every rank.
    """
    mesh = plan.layout.mesh
    axes = (mesh.dp * mesh.cp, 1) if plan.layout.data.zero == 0 else (mesh.dp_replicate, mesh.dp_shard * mesh.cp)
    inner = plan.layout.tensor.inner
    copies = init_device_mesh(
        device.type, (mesh.pp, *axes, mesh.tp), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp")
    )
    flat = init_device_mesh(
        device.type,
        (mesh.pp, mesh.dp, mesh.cp, mesh.tp // inner, inner),
        mesh_dim_names=("pp", "dp", "cp", "tp0", "tp1"),
    )
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        state=copies["dp_replicate", "dp_shard"],
        dp=flat["dp"],
        pp=flat["pp"],
        cp=flat["cp"],
        tp=copies["tp"],
        tp2=flat["tp0", "tp1"],
    )


def close_ranks() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(backend: str) -> torch.device:
    if backend == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= (found := torch.cuda.device_count()):
        message = f"the plan is for accelerators, rank {index} of this node needs number {index}, torch sees {found}"
        raise ConfigurationError("PT513", message, "launch it where the accelerators are, with a torch built for them")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

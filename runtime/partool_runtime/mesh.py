"""The process group, device and mesh of a rank, built from the plan and passed around explicitly."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError
from partool_runtime.exchanges import Exchanges
from partool_runtime.groups import Groups, Parts
from partool_runtime.torch_internals.collectives import in_memory_store

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh of ranks; :class:`Groups` opens its process group where one is needed."""

    parts: Parts
    """Global ranks along the axis, for every position on the other axes."""
    mine: tuple[int, ...]
    """The part that contains this rank."""
    place: int
    """Place of this rank on the axis."""

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.mine)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this rank among the others."""

    rank: int
    world_size: int
    device: torch.device
    replicate: MeshAxis
    """The copies of the training state."""
    shard: MeshAxis
    """The ranks that share one copy of the training state. Ranks that share sequences also share a copy."""
    dp: MeshAxis
    """The data-parallel ranks with this rank's pipeline position, in the order of the data axes."""
    pp: MeshAxis
    """The ranks of one pipeline, which share their data."""
    tp: MeshAxis
    """The ranks that share every matrix and their data."""
    cp: MeshAxis
    """The ranks that share sequences; the tensor axis lies inside this axis."""
    tp0: MeshAxis
    """The outer axis of the tensor ranks; without two-dimensional tensor parallelism it covers all of them."""
    tp1: MeshAxis
    """The inner axis of the tensor ranks; without two-dimensional tensor parallelism it has one rank."""
    replica: MeshAxis
    """The ranks that together hold this rank's copy of the training state."""
    expert: MeshAxis | None = None
    """The ranks that share the experts of a layer, of which neighbours hold parts of the same experts; None if each
    rank, or team of tensor ranks, has all experts."""
    expert_rail: MeshAxis | None = None
    """Those of ``expert`` with this rank's place in their nodes; None unless tokens cross to each node once."""
    expert_node: MeshAxis | None = None
    """Those of ``expert`` in this rank's node; None unless tokens cross to each node once."""
    expert_replicate: MeshAxis | None = None
    """The copies of the training state of this rank's experts."""
    expert_shard: MeshAxis | None = None
    """The ranks that share one copy of the training state of the same experts."""
    exchanges: Exchanges | None = None
    """What copies exchange in which step; None if they average gradients in every step."""
    groups: Groups = field(default_factory=Groups)
    """Opens the process groups of axes and of other parts of the world."""
    tensors: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns the context in which the model's memory is allocated and steps run; the tensors of a dry run are fake."""

    @property
    def world(self) -> dist.ProcessGroup:
        """The group of all ranks, for global agreement."""
        group = dist.group.WORLD
        assert group is not None, "the process group was left"
        return group

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The group of the tensor ranks, of which there are several; the first use is a collective of all ranks."""
        group = self.groups.of(self.tp.parts)
        assert group is not None, "one tensor rank has no group"
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
    a whole copy of the training state on every rank. No process group is opened.
    """
    mesh, inner = plan.layout.mesh, plan.layout.tensor.inner
    copies, sharers = (mesh.dp * mesh.cp, 1)
    if plan.layout.data.zero:
        copies, sharers = mesh.dp_replicate, mesh.dp_shard * mesh.cp
    of_state = (mesh.pp, copies, sharers, mesh.tp)
    expert = plan.layout.expert_ranks
    # Sequence and tensor ranks share experts as well (parallel folding, arXiv 2504.14960), neighbours first.
    of_experts = (mesh.pp, copies, sharers * mesh.tp // expert, expert)
    expert_axes = [_axis(of_experts, axis) if expert > 1 else None for axis in (1, 2, 3)]
    rail, node = _node_axes(plan, of_experts)
    flat = (mesh.pp, mesh.dp, mesh.cp, mesh.tp // inner, inner)
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        replicate=_axis(of_state, 1),
        shard=_axis(of_state, 2),
        dp=_axis(flat, 1),
        pp=_axis(flat, 0),
        cp=_axis(flat, 2),
        tp=_axis(of_state, 3),
        tp0=_axis(flat, 3),
        tp1=_axis(flat, 4),
        expert_replicate=expert_axes[0],
        expert_shard=expert_axes[1],
        expert=expert_axes[2],
        expert_rail=rail,
        expert_node=node,
        replica=_together((mesh.pp, copies, sharers * mesh.tp)),
        exchanges=Exchanges.of(plan),
        groups=Groups(in_order=device.type == "cuda"),
    )


def _node_axes(plan: Plan, of_experts: tuple[int, int, int, int]) -> tuple[MeshAxis | None, MeshAxis | None]:
    """Return the axes over the nodes of ranks that share experts, and inside a node; None where tokens go directly."""
    if plan.layout.expert_exchange in ("direct", "padded"):
        return None, None
    *outer, expert = of_experts
    inside = plan.devices.joined
    of_nodes = (*outer, expert // inside, inside)
    return _axis(of_nodes, 3), _axis(of_nodes, 4)


def _axis(sizes: tuple[int, ...], axis: int) -> MeshAxis:
    """Return one axis of the world, whose ranks are numbered along axes of these sizes, the last axis fastest."""
    numbers = torch.arange(math.prod(sizes)).view(sizes).movedim(axis, -1).reshape(-1, sizes[axis])
    inside = math.prod(sizes[axis + 1 :])
    parts = tuple(map(tuple, numbers.tolist()))
    before, place = divmod(dist.get_rank() // inside, sizes[axis])
    return MeshAxis(parts, parts[before * inside + dist.get_rank() % inside], place)


def _together(sizes: tuple[int, int, int]) -> MeshAxis:
    """Return, as an axis, the ranks that differ only in their places on the outer and inner axes."""
    parts = tuple(map(tuple, torch.arange(math.prod(sizes)).view(sizes).movedim(1, 0).flatten(1).tolist()))
    mine = next(part for part in parts if dist.get_rank() in part)
    return MeshAxis(parts, mine, mine.index(dist.get_rank()))


def close_ranks(ranks: Ranks | None = None) -> None:
    """Leave the process groups that ``ranks`` have opened, and the world."""
    if dist.is_initialized():
        if ranks is not None:
            ranks.groups.close()
        dist.destroy_process_group()


def _device(backend: str) -> torch.device:
    if backend == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= (count := torch.cuda.device_count()):
        message = f"the plan is for accelerators, rank {index} of this node needs number {index}, torch sees {count}"
        raise ConfigurationError("PT513", message, "launch it where the accelerators are, with a torch built for them")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

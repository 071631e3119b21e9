"""Trains with shards on the device and with shards in host memory, and compares all bits; as any number of ranks."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from _ranks import joined
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from partool.plan.layout import OffloadLayout
from partool_runtime.offload import HostMemory
from partool_runtime.offload.lanes import ThreadLanes
from partool_runtime.offload.parameters import HostParameters
from partool_runtime.torch_internals.fsdp import gathered_bytes
from partool_runtime.torch_internals.group_gather import gather_otherwise
from partool_runtime.torch_internals.tensors import local

WIDTH = 7


class Layer(nn.Module):
    """Sizes that no number of ranks divides; the bias of one element leaves all ranks but one without any."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).tanh())
        return x + hidden * self.scale + self.shift


def sharded(mesh: DeviceMesh, *, apart: bool = False, most_kept: int = 0, unit: int = 1) -> nn.Sequential:
    """Return a model of six layers, ``unit`` of them gathered together, and a root with two more parameters."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Layer() for _ in range(6)), nn.Linear(WIDTH, 3)).double()
    for first in range(0, 6, unit):
        fully_shard(list(model[first : first + unit]), mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if apart or most_kept:
                gather_otherwise(module, apart=apart, in_turn=False, most_kept=most_kept)
    return model


class Resting:
    """Stand-in for the hooks of host parameters, for parameters that stay on the device."""

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def written(self) -> None:
        pass


def trained(model: nn.Sequential, shards: HostParameters | Resting, steps: int = 3) -> list[torch.Tensor]:
    """Train; return all gradients of all steps and what this rank has of the parameters then."""
    draws, device = torch.Generator().manual_seed(dist.get_rank()), next(model.parameters()).device
    seen = []
    for step in range(steps):
        shards.begin()
        for _ in range(2):
            x = torch.randn(4, WIDTH, generator=draws, dtype=torch.float64).to(device)
            model(x).square().sum().backward()
        shards.settle()
        for parameter in model.parameters():
            grad = parameter.grad
            assert grad is not None
            seen.append(local(grad).clone())
            with torch.no_grad():
                shard = local(parameter)
                shard.sub_(local(grad).to(shard.device), alpha=0.01 * (step + 1))
            parameter.grad = None
        shards.written()
        with torch.no_grad():
            seen.append(model(x).clone())  # evaluation, which leaves the root gathered
        model.reshard()  # type: ignore[operator]
    return [*seen, *(local(parameter).detach().clone() for parameter in model.parameters())]


def moved(model: nn.Module, folder: str = "", delays: random.Random | None = None) -> HostParameters:
    """Let a model's shards be in host memory, or in a folder."""
    disk = OffloadLayout(dir=folder, buffers=3) if folder else None
    device = next(model.parameters()).device
    memory, lanes = HostMemory(pinned=device.type == "cuda"), ThreadLanes(delays) if device.type == "cpu" else None
    return HostParameters([model], device, memory=memory, lanes=lanes, disk=disk)


def compared(mesh: DeviceMesh, folder: str = "", **how: int) -> HostParameters:
    """Train both ways and compare; return what kept the shards of the second."""
    plain = sharded(mesh, **how)  # type: ignore[arg-type]
    wanted = trained(plain, Resting())
    model = sharded(mesh, **how)  # type: ignore[arg-type]
    shards = moved(model, folder, random.Random(dist.get_rank()))
    found = trained(model, shards)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, wanted, strict=True))
    assert shards.moved_bytes > 0
    assert not any(unit.lent for unit in shards._units)
    shards.close()
    assert gathered_bytes(model) == gathered_bytes(plain)
    return shards


HOWS: dict[str, dict[str, Any]] = {
    "plain": {}, "apart": {"apart": True}, "few kept": {"most_kept": 7}, "units of two": {"unit": 2}
}  # fmt: skip


def check(how: str, folder: str) -> None:
    """Compare on all ranks of the pool; ``files`` and ``replicas`` are ways by themselves."""
    torch.use_deterministic_algorithms(True)  # new memory holds NaN, which no loss may reach
    joined()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if how == "files":
        compared(mesh, folder)
    elif how == "replicas":
        compared(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))
    else:
        compared(mesh, **HOWS[how])

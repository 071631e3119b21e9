"""Shards of FSDP2's units that live in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from partool_runtime.torch_internals.fsdp import groups_of
from partool_runtime.torch_internals.group_gather import GroupGather


class UnitShards:
    """Shards of one FSDP2 unit, which are stored outside of its device's memory between gathers.

    FSDP2 can keep shards in host memory (``CPUOffloadPolicy``), but it also copies reduced gradients to host memory,
    and waits for each copy before hooks see the gradient. Here only shards are in host memory: the parameters report
    the device, so gradients stay on the device, and ``bring`` supplies the shards to be gathered. Do not take views of
    such a parameter, not even by ``detach()``; take views of its :func:`local` part.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._parameters = group.fsdp_params
        self._homes: list[torch.Tensor] = []
        self._gather, self._wait = group.unshard, group.wait_for_unshard
        self._bring: Callable[[], list[torch.Tensor]] = list
        self._ready: Callable[[], None] = _nothing
        self._released: Callable[[], None] = _nothing

    @property
    def sizes(self) -> list[tuple[int, torch.dtype]]:
        """Number of elements (padded as for the gather) and type of each of this rank's shards."""
        return [(p.padded_sharded_param_size.numel(), p.sharded_param.dtype) for p in self._parameters]

    @property
    def waits(self) -> bool:
        """Whether a gather was started but not waited for."""
        return self._group._all_gather_result is not None

    def move(self, homes: list[torch.Tensor]) -> None:
        """Move shards, with their values, to ``homes``: flat tensors of the sizes and types in :attr:`sizes`."""
        self._homes = homes
        for parameter, home in zip(self._parameters, homes, strict=True):
            old = parameter.sharded_param
            data = parameter._sharded_param_data
            if not data.is_meta:
                home.copy_(data)
            shard = home.view(parameter.padded_sharded_param_size)
            dim = parameter.fsdp_placement.dim
            part = shard.narrow(dim, 0, parameter.sharded_size[dim] if parameter.sharded_size.numel() else 0)
            like = torch.empty(0, dtype=part.dtype, device=self._device)
            shell = DTensor(like, parameter._sharding_spec, requires_grad=False)  # type: ignore[no-untyped-call]
            moved = nn.Parameter(shell, requires_grad=old.requires_grad)
            cast(Any, moved)._local_tensor = part
            parameter.sharded_param, parameter._sharded_param_data = moved, home
            parameter._setattr_on_modules(moved)

    def watch(
        self, bring: Callable[[], list[torch.Tensor]], ready: Callable[[], None], released: Callable[[], None]
    ) -> None:
        """Make each gather call ``bring`` for its shards, then ``ready`` on its stream, and at its end ``released``."""
        self._bring, self._ready, self._released = bring, ready, released
        self._group.unshard, self._group.wait_for_unshard = self._unshard, self._wait_for_unshard

    def _unshard(self, async_op: bool = False) -> None:
        group = self._group
        busy = group._all_gather_result is not None or group.is_unsharded
        if busy or (not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"):
            return
        for parameter, shard in zip(self._parameters, self._bring(), strict=True):
            parameter._sharded_param_data = shard
        if group._all_gather_process_group.size() > 1:
            # A gather with one message per unit copies shards on a separate stream.
            stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
            with group.device_handle.stream(stream):
                self._ready()
        if isinstance(getattr(self._gather, "__self__", None), GroupGather):
            self._ready()  # with one message per parameter, messages start on this stream, even with one rank
        self._gather(async_op)

    def _wait_for_unshard(self) -> None:
        if not self.waits:
            return
        self._ready()  # with a single rank, shards are copied here
        self._wait()
        self.put_back()
        self._released()

    def put_back(self) -> None:
        """Make FSDP2's shards refer again to the memory where the shards are kept between gathers."""
        for parameter, home in zip(self._parameters, self._homes, strict=True):
            parameter._sharded_param_data = home


def _nothing() -> None:
    pass


def unit_shards(roots: Iterable[nn.Module], device: torch.device) -> list[UnitShards]:
    """Return the shards of all FSDP2 units below roots, in the order of the modules."""
    groups: dict[int, Any] = {}
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                groups |= {id(group): group for group in groups_of(module._get_fsdp_state())}
    return [UnitShards(group, device) for group in groups.values()]

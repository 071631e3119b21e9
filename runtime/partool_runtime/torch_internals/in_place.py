"""Use of FSDP2's parameters where they lie, in units of one rank that computes in the masters' own type."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from partool_runtime.torch_internals.fsdp import own_groups


class InPlace:
    """Lets one FSDP2 unit of one rank compute with its masters; it replaces the unit's own gathers.

    FSDP2 copies the shards of such a unit into the storage that it computes with, in each step, even if they are whole
    and of the right type. Here that storage is the shards' own. A unit that casts its parameters is gathered by FSDP2.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._wait = group, group.wait_for_unshard
        group.wait_for_unshard = self._wait_for_unshard

    @torch.no_grad()
    def _wait_for_unshard(self) -> None:
        group = self._group
        if group._all_gather_result is None or any(parameter.param_dtype for parameter in group.fsdp_params):
            self._wait()
            return
        for parameter in group.fsdp_params:
            self._share(parameter)
        group._to_unsharded()
        group._all_gather_result = None

    def _share(self, parameter: Any) -> None:
        """Make the unsharded parameter a view of the shard; anew after FSDP2 has moved the shard to other storage."""
        shard = parameter._sharded_param_data
        if not parameter.all_gather_outputs or parameter.all_gather_outputs[0] is not shard:
            parameter.all_gather_outputs = [shard]
            parameter.free_unsharded_param = _free_nothing
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param
        parameter.init_unsharded_param()


def _free_nothing() -> None:
    """Replace FSDP2's release, which would empty the shard's storage."""


def use_in_place(module: FSDPModule) -> None:
    """Let a module's own units compute with their masters where one rank has a unit and casts nothing."""
    for group in own_groups(module):
        if group._all_gather_process_group.size() == 1:
            InPlace(group)

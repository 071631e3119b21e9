"""FSDP2's units: what they hold, and when they gather and reduce."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor

from partool_runtime.torch_internals.tensors import local_bytes


def wide_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Let FSDP2 leave reduced gradients in ``dtype``, for parameters that are sharded in a narrower type.

    It casts them to the parameters' own type; the widest sum is lost then. Called behind its lazy initialisation, that
    is in the first forward pass, or before: the groups are told when they are set up.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = dtype
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module._get_fsdp_state()):
                _leave_wide(group, dtype)


def _leave_wide(group: Any, dtype: torch.dtype) -> None:
    set_up = group._init_mp_dtypes

    def then() -> None:
        set_up()
        group._orig_dtype = dtype

    group._init_mp_dtypes = then


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit's state."""
    one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return list(getattr(state, "_fsdp_param_groups", [] if one is None else [one]))


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that FSDP2 holds gathered now; it offers no public look at them."""
    outputs = [tensor for parameter in _fsdp_parameters(model) for tensor in parameter.all_gather_outputs]
    return sum(tensor.untyped_storage().size() for tensor in outputs)


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients this rank holds now: its shards, and whole ones that wait for their reduction."""
    held = [parameter.grad for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]
    whole = []
    for parameter in _fsdp_parameters(model):
        whole += [
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        ]
    return local_bytes(held) + local_bytes(tensor for tensor in whole if tensor is not None)


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    # Modules that are gathered together share one state.
    states = {id(s): s for m in model.modules() if isinstance(m, FSDPModule) for s in [m._get_fsdp_state()]}
    found = []
    for state in states.values():
        found += [parameter for group in groups_of(state) for parameter in group.fsdp_params]
    return found


def keep_gradients(root: FSDPModule) -> None:
    """Add gradients that came by other means than a backward pass to what waits for its reduction, in that one's type.

    FSDP2 does so where a backward pass ends, and not otherwise: sums would be of the narrow type of computation.
    """
    for parameter in _fsdp_parameters(cast(nn.Module, root)):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def end_backward(root: FSDPModule, *, fill: bool) -> None:
    """Do what FSDP2 does where a backward pass through ``root`` ends: reduce gradients, release parameters, as set.

    It hangs that onto autograd only. With ``fill``, parameters that have no gradient this time take part with zeros:
    FSDP2 adds partial sums over replicas up as one flat tensor, which must not change its shape.
    """
    for parameter in _fsdp_parameters(cast(nn.Module, root)) if fill else ():
        whole = parameter.unsharded_param
        if whole.requires_grad and whole.grad is None and parameter.unsharded_accumulated_grad is None:
            whole.grad = torch.zeros_like(whole)
            parameter.to_accumulated_grad_if_needed()
    root._get_fsdp_state()._root_post_backward_final_callback()


def gather_in_background(root: FSDPModule) -> None:
    """Let the units under ``root`` start their gathers without waiting for them, where they are asked for ahead.

    Only :meth:`FSDPModule.unshard` has a public switch, not the gathers ahead that ``set_modules_to_…_prefetch`` asks
    for. On a GPU those are on a stream of their own anyway.
    """
    root._set_unshard_async_op(True)


def sum_replicas_by(module: FSDPModule, add_up: Callable[[torch.Tensor], None]) -> None:
    """Let ``add_up`` sum a unit's gradients over the replicas, in place of FSDP2's all-reduce, which returns when done.

    ``add_up`` gets this rank's gradients as one flat tensor. The public hook is called behind FSDP2's own all-reduce
    and not in its place; the mesh of the unit's group is what decides whether there is one.
    """
    for group in own_groups(module):
        mesh = group.mesh_info
        group.mesh_info = FSDPMeshInfo(mesh=mesh.mesh, shard_mesh_dim=mesh.shard_mesh_dim)
    module.set_all_reduce_hook(add_up)


def gather_in_order(module: FSDPModule) -> None:
    """Let a module's own units be gathered when the work before is done, and not beside it on streams of their own."""
    for group in own_groups(module):
        group.unshard_async_op = True


def fill_before_reduction(module: FSDPModule) -> None:
    """Let parameters of a unit that got no gradient take part in its reductions with zeros.

    Without it the tensor that is reduced has another size than on other ranks, or no reduction is started at all. torch
    2.13 has ``set_reduce_scatter_unused_params`` for it; older ones have not, and none lets narrow gradients join wide
    ones that have accumulated.
    """
    for group in own_groups(module):
        group.post_backward = partial(_filled, group, group.post_backward)


def _filled(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    used = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad]
    wide = any(parameter.unsharded_accumulated_grad is not None for parameter in used)
    for parameter in used if group.reduce_grads else ():
        if parameter.unsharded_param.grad is None and parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        if wide:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
    post_backward(*unused)


def own_groups(module: FSDPModule) -> list[Any]:
    """Return the groups of parameters of a unit, those of units within it left out."""
    return groups_of(module._get_fsdp_state())

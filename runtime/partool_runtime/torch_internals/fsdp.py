"""Control of FSDP2's units: the memory that units hold, and when units gather and reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from partool_runtime.torch_internals.tensors import local_bytes


def wide_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Make FSDP2 keep reduced gradients in ``dtype``, for parameters that are sharded in a less precise type.

    By default FSDP2 casts gradients to the parameters' type, so sums lose precision. Call this function before or after
    FSDP2's lazy initialisation in the first forward pass: the setting is applied when the groups are set up.
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
    """Return the parameter groups in the state of an FSDP2 unit."""
    one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
    return list(getattr(state, "_fsdp_param_groups", [] if one is None else [one]))


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that FSDP2 holds gathered at the moment; no public API reports them.

    Parameters that are used where their shards lie count nothing.
    """
    outputs = [
        tensor
        for parameter in _fsdp_parameters(model)
        for tensor in parameter.all_gather_outputs
        if tensor is not parameter._sharded_param_data
    ]
    return sum(tensor.untyped_storage().size() for tensor in outputs)


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients that the rank holds.

    They are reduced shards, shards that replicas have yet to add up, and whole gradients before their reduction.
    """
    # While parameters are gathered, the module's own parameters are not the shards, which keep their gradients.
    gradients = [group._partial_reduce_output for group in _fsdp_groups(model)]
    for parameter in _fsdp_parameters(model):
        gradients += [
            getattr(getattr(parameter, "sharded_param", None), "grad", None),
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        ]
    return local_bytes(tensor for tensor in gradients if tensor is not None)


@contextmanager
def without_parameter_gradients(root: nn.Module) -> Iterator[None]:
    """Let no parameter under ``root`` require gradients, whether it is gathered or not.

    FSDP2 is initialised first, because it takes the types of reductions from the parameters that require gradients. A
    parameter that is gathered for the first time within the context requires gradients afterwards.
    """
    if isinstance(root, FSDPModule):
        root._get_fsdp_state()._lazy_init()
    units = [each for each in _fsdp_parameters(root) if each.sharded_param.requires_grad]
    sharded = [each.sharded_param for each in units]
    others = [parameter for parameter in root.parameters() if parameter.requires_grad]

    def require(gradients: bool) -> None:
        gathered = [each._unsharded_param for each in units if hasattr(each, "_unsharded_param")]
        for parameter in (*others, *sharded, *gathered):
            parameter.requires_grad_(gradients)

    require(False)
    try:
        yield
    finally:
        require(True)


def unreduced_gradients(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return gradients that have not been reduced over all ranks, by the name of the parameter or of the unit.

    These are gradients of gathered parameters (FSDP2 keeps their sum in the parameters themselves if it has the type of
    the reduction), and shards of units that replicas have yet to add up.
    """
    gathered = {each._param_fqn or "": getattr(each, "_unsharded_param", None) for each in _fsdp_parameters(root)}
    full_gradients = {name: each.grad for name, each in gathered.items() if each is not None and each.grad is not None}
    shards = [(group.fsdp_params[0]._param_fqn, group._partial_reduce_output) for group in _fsdp_groups(root)]
    return full_gradients | {f"unit of {name}": partial for name, partial in shards if partial is not None}


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    return [parameter for group in _fsdp_groups(model) for parameter in group.fsdp_params]


def _fsdp_groups(model: nn.Module) -> list[Any]:
    # Modules that are gathered together share one state.
    states = {id(s): s for m in model.modules() if isinstance(m, FSDPModule) for s in [m._get_fsdp_state()]}
    return [group for state in states.values() for group in groups_of(state)]


def keep_gradients(root: FSDPModule) -> None:
    """Add gradients that were computed outside of backward passes to the unreduced gradients, in the reduction's type.

    FSDP2 itself adds such gradients only at the end of a backward pass; earlier sums would have less precision.
    """
    for parameter in _fsdp_parameters(cast(nn.Module, root)):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def end_backward(root: FSDPModule, *, fill: bool) -> None:
    """Run FSDP2's work for the end of a backward pass: reduce gradients and release parameters as its flags say.

    FSDP2 runs it only from autograd. With ``fill``, a parameter without a gradient gets zeros as its gradient: FSDP2
    accumulates partial sums over replicas in one flat tensor, whose shape must not change.
    """
    for parameter in _fsdp_parameters(cast(nn.Module, root)) if fill else ():
        full = parameter.unsharded_param
        if full.requires_grad and full.grad is None and parameter.unsharded_accumulated_grad is None:
            full.grad = torch.zeros_like(full)
            parameter.to_accumulated_grad_if_needed()
    root._get_fsdp_state()._root_post_backward_final_callback()


def gather_in_background(root: FSDPModule) -> None:
    """Make prefetches of units under ``root`` asynchronous.

    Only :meth:`FSDPModule.unshard` has a public switch for it. The prefetches by ``set_modules_to_…_prefetch`` do
    not. On a GPU prefetches run on a separate stream anyway.
    """
    root._set_unshard_async_op(True)


def sum_replicas_by(module: FSDPModule, add_up: Callable[[torch.Tensor], None]) -> None:
    """Make ``add_up`` sum a unit's gradients over the replicas, instead of FSDP2's blocking all-reduce.

    ``add_up`` gets this rank's gradients as one flat tensor. The public hook is called after FSDP2's own all-reduce
    and does not replace it; the mesh of the unit's group determines whether FSDP2 all-reduces.
    """
    for group in own_groups(module):
        mesh = group.mesh_info
        group.mesh_info = FSDPMeshInfo(mesh=mesh.mesh, shard_mesh_dim=mesh.shard_mesh_dim)
    module.set_all_reduce_hook(add_up)


def gather_in_order(module: FSDPModule) -> None:
    """Make a module's own units run their gathers on the current stream, after earlier work, not on another stream."""
    for group in own_groups(module):
        group.unshard_async_op = True


def fill_before_reduction(module: FSDPModule) -> None:
    """Make a unit's reductions use zeros as the gradient of each parameter that has no gradient.

    Without this, the reduced tensor has another size than on other ranks, or no reduction starts at all. torch 2.13 has
    ``set_reduce_scatter_unused_params`` for this purpose, older versions do not. No version adds bf16 or
    fp16 gradients to accumulated float32 gradients.
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
    """Return the parameter groups of a unit, without the groups of units within it."""
    return groups_of(module._get_fsdp_state())

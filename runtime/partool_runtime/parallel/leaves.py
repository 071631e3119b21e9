"""Leaf modules, such as experts, are gathered and reduced as one unit although ranks use different parts of them.

If a rank sends no token to an expert, the expert's weights get no gradient on this rank. If a rank sends no token to
any expert of a layer, autograd skips the layer's backward pass. Without special treatment, ranks would start different
collectives, and hang or add up gradients of different parameters. A leaf takes part in all collectives on every rank
that calls it; missing gradients are replaced by zeros. (DeepSpeed calls such modules leaf modules,
``deepspeed.utils.set_z3_leaf_modules``.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from partool_runtime.torch_internals.fsdp import fill_before_reduction


def find_leaves(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules whose name matches one of the glob patterns, by name.

    If a module within a matching module also matches, only the outer one is returned.
    """
    leaves: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in leaves)
        if name and not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            leaves[name] = module
    return leaves


def join_graph(leaf: nn.Module) -> None:
    """Make a leaf's outputs depend on all its inputs, used or not, and on a parameter; call before ``fully_shard``.

    FSDP2 gathers a unit's parameters for the backward pass when the gradient of the unit's outputs arrives. FSDP2
    reduces gradients when the gradients of the unit's inputs are complete. Hooks registered before ``fully_shard`` run
    inside of FSDP2's hooks.
    """
    leaf.register_forward_hook(_join, with_kwargs=True)


def fill_missing(leaf: FSDPModule) -> None:
    """Before a sharded leaf's reductions, set each missing gradient of the leaf's parameters to zeros."""
    fill_before_reduction(leaf)


class _Join(torch.autograd.Function):
    """Returns the first input tensors; autograd treats the other input tensors as used, but they get no gradient."""

    @staticmethod
    def forward(ctx: Any, outputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the first ``outputs`` tensors, without copying."""
        ctx.others = len(tensors) - outputs
        ctx.set_materialize_grads(False)
        # Returning an input itself would make it a view, and FSDP2 cannot track in-place writes to views.
        return tuple(tensor.detach() for tensor in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the first tensors unchanged, and no gradient for the other inputs."""
        return (None, *gradients, *[None] * ctx.others)


def _join(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    anchors = [*_tensors((args, kwargs)), *trained[:1]]
    outputs = [tensor for tensor in _tensors(output, trained_only=False) if tensor.is_floating_point()]
    if not outputs or not any(tensor.requires_grad for tensor in anchors):
        return output
    joined = _Join.apply(len(outputs), *outputs, *anchors)  # type: ignore[no-untyped-call]
    return _replaced(output, {id(old): new for old, new in zip(outputs, joined, strict=True)})


def _tensors(value: Any, *, trained_only: bool = True) -> list[torch.Tensor]:
    """Return the distinct tensors in nested containers; with ``trained_only``, only tensors that require gradients."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad or not trained_only else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    distinct = {id(tensor): tensor for item in inner for tensor in _tensors(item, trained_only=trained_only)}
    return list(distinct.values())


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """Return a copy of nested containers; tensors whose id is a key of ``by`` are replaced by that key's value."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if type(value) is dict:
        return {key: _replaced(item, by) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, by) for item in value)
    return value

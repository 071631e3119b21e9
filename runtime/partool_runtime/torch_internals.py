"""The one place that touches private names of torch, each with the reason and the public way that is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

# Documented (docs.pytorch.org, torch.compiler_fake_tensor), under a private name still.
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: PLC0414
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Documented for extension authors, under a private name still.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor without copying, and the tensor itself where it is not a DTensor.

    ``DTensor.to_local`` builds an autograd node per call, which costs as much as the optimizer on small models.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of tensors."""
    return sum(part.numel() * part.itemsize for part in map(local, tensors))


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
        one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
        groups = getattr(state, "_fsdp_param_groups", [] if one is None else [one])
        found += [parameter for group in groups for parameter in group.fsdp_params]
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


def group_size(process_group: Any) -> int:
    """Return the number of ranks of a process group as the dispatcher passes it: a boxed script object."""
    if isinstance(process_group, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(process_group).size()
    return int(process_group.size())


def named_group_size(name: str) -> int:
    """Return the number of ranks of a process group known by name, as functional collectives pass it."""
    return int(distributed_c10d._resolve_process_group(name).size())  # type: ignore[attr-defined,arg-type]


def in_memory_store() -> Any:
    """Return a rendezvous store for a world of one rank: no port, no file. It is exported, but not typed so."""
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


def fused_adamw(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    step: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Update parameters and moments in place, in one fused kernel per device and type.

    ``torch.optim.AdamW`` keeps one step counter per parameter and looks up its state for each; here ``step`` is one
    float32 scalar, the same for all, already counted up.
    """
    torch._fused_adamw_(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def scaled_product(m: int, n: int, k: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return an fp8 product [m, k] × [k, n] with one scale per tensor, ready to be repeated.

    ``torch.nn.functional.scaled_mm`` is younger than the oldest torch that is supported.
    """
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and handles hold a storage, in Python, in C++ and in autograd graphs."""
    return int(torch._C._storage_Use_Count(storage._cdata))

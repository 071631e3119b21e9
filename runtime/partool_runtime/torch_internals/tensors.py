"""Tensor internals: a rank's part, storage, version, and operators that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses import fake_tensor

# Documented (docs.pytorch.org, torch.compiler_fake_tensor), but under a private name.
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # noqa: PLC0414
from torch.distributed.checkpoint import filesystem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Documented for extension authors, but under a private name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

StorageInfo = filesystem._StorageInfo
"""Location of a block of a checkpoint: file, offset and length."""


def tensors_in(values: object) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor without copying, and any other tensor itself.

    ``DTensor.to_local`` builds an autograd node per call, which costs as much as the optimizer on small models.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def forget_meshes() -> None:
    """Empty torch's caches of shardings: they hold meshes, which a later process group of this process must not get.

    ``torch.distributed.tensor.debug`` has this function, but importing it imports torch's compiler, for a second.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()


def skip_first_allocation() -> None:
    """Let fake tensors of a GPU be made without the real one that torch makes first, where it believes in a GPU."""
    setattr(fake_tensor, "init_gpu_context", lambda device: None)  # noqa: B010 - mypy forbids it


def without_modes() -> AbstractContextManager[object]:
    """Return a context without dispatch modes, for code that reads the values of tensors that it makes."""
    return _disable_current_modes()


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the number of bytes of this rank's parts of tensors."""
    return sum(part.numel() * part.itemsize for part in map(local, tensors))


def placed_like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a parameter's placement and the local part ``part``, whose type and device may differ.

    ``DTensor.from_local`` is not used because it moves the part to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return part
    spec = parameter._spec
    shape = TensorMeta(spec.shape, spec.stride, part.dtype)
    placed = DTensorSpec(spec.mesh, spec.placements, tensor_meta=shape)
    return cast(torch.Tensor, DTensor(part, placed, requires_grad=False))  # type: ignore[no-untyped-call]


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

    ``torch.optim.AdamW`` keeps a step counter and a state lookup per parameter; here ``step`` is one float32 scalar for
    all parameters, already incremented.
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
    """Return a function that computes an fp8 product [m, k] × [k, n] with one scale per tensor, for repeated calls.

    ``torch.nn.functional.scaled_mm`` does not exist in the oldest supported torch.
    """
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def is_higher_order(operator: object) -> bool:
    """Return whether an operator calls another operator that is one of its arguments."""
    return isinstance(operator, HigherOrderOperator)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of no subclass; a fake tensor stands for a plain one."""
    return type(tensor) in (torch.Tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if and only if they share a storage; the number is valid while it lives.

    A fake tensor's storage has no address.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and handles that hold a storage, in Python, in C++ and in autograd graphs."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def writes(tensor: torch.Tensor) -> int:
    """Return a tensor's number of in-place writes, from a private attribute; 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def unseen_writes(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Hide writes to tensors that autograd has saved, for writes that do not change the values."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]

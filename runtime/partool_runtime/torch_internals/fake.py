"""Fake tensors where they stand for a device that does not exist, and a process group without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode, _BypassDispatchCache
from torch.nn import functional as F
from torch.utils._device import _device_constructors

from partool_runtime.torch_internals.tensors import without_modes

ALONE = "fake"
"""Backend of process groups whose collectives return at once, without other ranks."""


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Yield a mode in which tensors are fake; where the host reads a number from a fake tensor it gets 0.

    All elements are 0 for ``nonzero`` as well, so that a batch is one document.

    ``torch.tensor`` with a device makes a fake tensor, too: torch itself would put its numbers on the device first.
    Attention on GPUs is the operator of a kernel that a torch for GPUs would choose; this torch has none of them and
    would fall back to products that hold all scores.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # torch compiles under no mode that forbids it; operators know this class, and none derived from it.
    vars(mode)["ignore_compile_internals"] = lambda: True
    vars(mode)["_cache_key"] = _without_storages(mode._cache_key)
    table, read = fake_impls.op_implementations_dict, torch.ops.aten._local_scalar_dense.default
    _device_constructors()  # torch keeps this set of functions, in which the usual ``torch.tensor`` has to be
    before, made, attend = table[read], torch.tensor, F.scaled_dot_product_attention
    places, original = torch.ops.aten.nonzero.default, table[torch.ops.aten.nonzero.default]
    table[read] = lambda mode, func, tensor: _zero(tensor.dtype)
    table[places] = lambda mode, func, tensor: tensor.new_empty((0, tensor.ndim), dtype=torch.int64)
    torch.tensor = _made_on_devices(mode, made)
    F.scaled_dot_product_attention = _attended_by_kernels(attend)
    table.setdefault(torch.ops.aten.record_stream.default, _nothing)  # torch has no fake implementation of it
    try:
        yield mode
    finally:
        table[read], torch.tensor, F.scaled_dot_product_attention = before, made, attend
        table[places] = original


def _without_storages(cache_key: Any) -> Any:
    """Return a mode's function for keys of its cache, which refuses calls with storages: the cache would keep them."""

    def refusing(state: Any, func: Any, *rest: Any) -> Any:
        if func is torch.ops.aten.set_.source_Storage:
            raise _BypassDispatchCache("its key would hold a storage")
        return cache_key(state, func, *rest)

    return refusing


CALL_OF_MODULE = torch.nn.Module._call_impl.__code__
"""Code that runs hooks and the forward function of each module that is called."""


def in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() >= 0


def current_node() -> Any:
    """Return the autograd node that a backward pass executes on this thread; None outside of backward passes."""
    return torch._C._current_autograd_node()


def _made_on_devices(mode: FakeTensorMode, made: Any) -> Any:
    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> torch.Tensor:
        if device is None or torch.device(device).type == "cpu":
            return cast(torch.Tensor, made(data, dtype=dtype, device=device, **rest))
        with without_modes():
            real = made(data, dtype=dtype)
        return mode.from_tensor(real).to(device)

    return cast(Callable[..., torch.Tensor], tensor)


def _nothing(mode: FakeTensorMode, func: Any, *arguments: Any) -> None:
    pass


def _zero(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _attended_by_kernels(otherwise: Any) -> Any:
    """Return ``scaled_dot_product_attention`` which on GPUs calls an operator that holds no scores, if one can.

    The choice follows the conditions in torch's ``sdp_utils.cpp``: the flash kernel takes 16-bit types and no mask, the
    memory-efficient kernel takes all types but float64 and as many key heads as query heads.
    """

    def attend(  # noqa: PLR0917 - the signature of torch's function
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        narrow, width = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
        if query.is_cuda and narrow and attn_mask is None and width == value.shape[-1] <= _WIDEST_FLASH:
            return _flash((query, key, value), dropout_p, is_causal, width**-0.5 if scale is None else scale)
        grouped = query.shape[1] != key.shape[1]
        if not query.is_cuda or query.dtype == torch.float64 or grouped:
            out = otherwise(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return cast(torch.Tensor, out)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return cast(torch.Tensor, efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0])

    return attend


_WIDEST_FLASH = 256
"""Largest dimension of heads that the flash kernel takes."""


def _flash(heads: tuple[torch.Tensor, ...], dropout: float, causal: bool, scale: float) -> torch.Tensor:
    """Call the flash kernel on queries, keys and values, which are padded to a multiple of 8, as torch does."""
    width = heads[0].shape[-1]
    if rest := -width % 8:
        heads = tuple(F.pad(each, (0, rest)) for each in heads)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = flash(*heads, dropout, causal, False, scale=scale)[0]
    return out[..., :width] if rest else out

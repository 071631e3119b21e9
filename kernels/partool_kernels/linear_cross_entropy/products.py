"""Sums of matrix products wider than their factors, without a product of its own in between where a device can."""

from __future__ import annotations

import functools

import torch


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``leftᵀ · right`` to a total ``[V, H]``, of factors ``[C, V]`` and ``[C, H]``; the total may be wider."""
    if total.dtype == left.dtype:
        torch.addmm(total, left.T, right, out=total)
    elif _adds_wide(left.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(total, left.T, right, total.dtype, out=total)
    elif left.dtype == torch.float16:
        # A product in float16 may overflow where the sum that it is part of would not.
        total += left.T.to(total.dtype) @ right.to(total.dtype)
    else:
        total += left.T @ right


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether torch adds products of such factors to a float32 total; which devices do depends on its build."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    total = torch.zeros(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((total == 16.0).all())

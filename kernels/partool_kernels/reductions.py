"""Reductions over gradients, on the CPU through the compiled library, elsewhere through torch."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Literal

from partool_kernels import _native

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "native", "torch"]


class KernelUnavailableError(RuntimeError):
    """The compiled library was asked for and is not there."""


def finite_sum_squares(tensor: torch.Tensor, mode: Mode = "auto") -> tuple[float, bool]:
    """Return the sum of squares of a tensor, accumulated in float64, and whether all its elements are finite.

    ``tensor`` is of any shape and floating-point type; on the CPU one pass over memory is made. The native result does
    not depend on the processor's instruction set. Raises :class:`KernelUnavailableError` for a tensor on the CPU if
    ``mode`` is ``native`` and there is no compiled library.
    """
    native = _dtype_code(tensor) if mode != "torch" and tensor.device.type == "cpu" and tensor.is_contiguous() else None
    asked = mode == "native" and tensor.device.type == "cpu"
    lib = _native.library() if native is not None or asked else None
    if asked and lib is None:
        raise KernelUnavailableError("the compiled CPU library is missing; install where a C++ compiler is present")
    if lib is None or native is None:
        return _reference(tensor)
    total, finite = ctypes.c_double(), ctypes.c_int32()
    lib.partool_finite_sum_squares(tensor.data_ptr(), tensor.numel(), native, ctypes.byref(total), ctypes.byref(finite))
    return total.value, bool(finite.value)


def _dtype_code(tensor: torch.Tensor) -> int | None:
    codes = {"torch.float32": 0, "torch.float64": 1, "torch.bfloat16": 2, "torch.float16": 3}
    return codes.get(str(tensor.dtype))


def _reference(tensor: torch.Tensor) -> tuple[float, bool]:
    import torch

    total = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2
    # Finite float64 values may overflow in the sum; only then are the elements looked at one by one.
    return total, math.isfinite(total) or bool(torch.isfinite(tensor).all())

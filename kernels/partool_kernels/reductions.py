"""Reductions over gradients, on the CPU through the compiled library, elsewhere through torch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from partool_kernels import _native

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "native", "torch"]


class KernelUnavailableError(RuntimeError):
    """The compiled library was requested and is missing."""


BLOCK = 2**16
"""Number of consecutive elements of the flat tensor whose squares are summed together."""


def total(blocks: Sequence[float]) -> float:
    """Return the correctly rounded sum of ``blocks``, whatever their order; infinity if the sum overflows."""
    try:
        return math.fsum(blocks)
    except OverflowError:
        return math.inf


def block_sums(tensor: torch.Tensor, mode: Mode = "auto") -> tuple[tuple[float, ...], bool]:
    """Return each block's sum of squares (:data:`BLOCK` elements, float64), and whether all elements are finite.

    ``tensor`` is of any shape and floating-point type; on the CPU it is read once. The native result does
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
    sums, good = [], True
    squares, finite = ctypes.c_double(), ctypes.c_int32()
    for first in range(0, tensor.numel(), BLOCK):
        at, count = tensor.data_ptr() + first * tensor.itemsize, min(BLOCK, tensor.numel() - first)
        lib.partool_finite_sum_squares(at, count, native, ctypes.byref(squares), ctypes.byref(finite))
        sums.append(squares.value)
        good = good and bool(finite.value)
    return tuple(sums), good


def _dtype_code(tensor: torch.Tensor) -> int | None:
    codes = {"torch.float32": 0, "torch.float64": 1, "torch.bfloat16": 2, "torch.float16": 3}
    return codes.get(str(tensor.dtype))


def _reference(tensor: torch.Tensor) -> tuple[tuple[float, ...], bool]:
    import torch

    flat = tensor.detach().reshape(-1)
    blocks = [flat[first : first + BLOCK].double() for first in range(0, flat.numel(), BLOCK)]
    sums = tuple(float(block.square().sum()) for block in blocks)
    # A sum of finite float64 values may overflow; all elements are checked only if the sum is not finite.
    return sums, math.isfinite(total(sums)) or bool(torch.isfinite(flat).all())

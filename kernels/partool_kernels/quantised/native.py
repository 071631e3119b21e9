"""Quantised matrices as numbers by the compiled library, for tensors on the CPU."""

from __future__ import annotations

import torch

from partool_kernels import _native
from partool_kernels.quantised.codes import NF4_BLOCK, PartPlace

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def takes(mode: str, codes: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the library makes numbers of a type from codes in a mode of ``partool_kernels.device``."""
    here = type(codes) is torch.Tensor and codes.device.type == "cpu" and dtype in _CODES
    return here and mode != "torch" and _native.library() is not None


def dequantise(codes: torch.Tensor, scales: torch.Tensor, place: PartPlace, out: torch.Tensor) -> None:
    """Write the numbers of contiguous codes and float32 scales to ``out`` ``[rows, columns]``."""
    if out.numel() == 0:
        return
    lib = _native.library()
    assert lib is not None
    rows, columns = out.shape
    bits, skipped = 8 if codes.dtype == torch.int8 else 4, place.columns[0] % NF4_BLOCK
    status = lib.partool_dequantise(
        codes.data_ptr(), bits, scales.data_ptr(), rows, columns, skipped, out.data_ptr(), _CODES[out.dtype]
    )
    assert status == 0, status

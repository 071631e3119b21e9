"""Compression to one bit by the compiled library, for tensors on the CPU."""

from __future__ import annotations

import torch

from partool_kernels import _native

_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def takes(mode: str, *tensors: torch.Tensor) -> bool:
    """Return whether the library runs an operation on these tensors in a mode of ``partool_kernels.device``."""
    ours = all(
        type(t) is torch.Tensor and t.device.type == "cpu" and t.dtype in (*_CODES, torch.uint8) for t in tensors
    )
    return ours and mode != "torch" and _native.library() is not None


def pack(x: torch.Tensor, error: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, norm: str) -> None:
    """Compress ``x + error`` to ``bits`` and ``scales``; ``error`` becomes what they lack. All are contiguous."""
    lib = _native.library()
    assert lib is not None
    status = lib.partool_onebit_pack(
        x.data_ptr(),
        _CODES[x.dtype],
        error.data_ptr(),
        _CODES[error.dtype],
        x.numel(),
        bits.shape[-1] * 8,
        int(norm == "l2"),
        bits.data_ptr(),
        scales.data_ptr(),
    )
    assert status == 0, status


def unpack(bits: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the mean of the senders' tensors to ``out``; bits are [senders, chunks, chunk / 8], all contiguous."""
    lib = _native.library()
    assert lib is not None
    senders, chunks, row_bytes = bits.shape
    status = lib.partool_onebit_unpack(
        bits.data_ptr(),
        scales.data_ptr(),
        _CODES[scales.dtype],
        senders,
        chunks,
        row_bytes * 8,
        out.numel(),
        out.data_ptr(),
        _CODES[out.dtype],
    )
    assert status == 0, status

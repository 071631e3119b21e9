"""Matrices for tests of quantisation, the same on every machine, and short words for what becomes of them."""

from __future__ import annotations

import hashlib

import torch

SHAPES = ((37, 192), (129, 64), (1, 77), (1, 333), (303, 1024))
"""Odd rows; matrices of one row have odd widths, which bitsandbytes divides into the same blocks."""
TYPES = ("float32", "bfloat16")


def matrix(rows: int, columns: int, dtype: str) -> torch.Tensor:
    """Return a matrix of sizes that differ by row; one row is zero, if there are several."""
    number = torch.arange(rows * columns, dtype=torch.int64).view(rows, columns)
    values = ((number * 7919 + number // 64 * 104729) % 2039 - 1019).double() / 1024
    values = values.pow(3) * 2.0 ** -(torch.arange(rows) % 5).double()[:, None]
    if rows > 1:
        values[min(3, rows - 1)] = 0.0
    return values.to(getattr(torch, dtype))


def word(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bits."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def name(shape: tuple[int, int], dtype: str) -> str:
    """Return the name of a matrix in the table of recorded hashes."""
    return f"{shape[0]} x {shape[1]} {dtype}"

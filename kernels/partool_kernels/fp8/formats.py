"""The 8-bit types, and the conversion to 8 bits by torch's operators, which is the reference of the kernel.

The types are OCP's e4m3 (``float8_e4m3fn``, "OCP 8-bit Floating Point Specification", up to 448) and AMD's older type
(``float8_e4m3fnuz``, up to 240), which gfx942 multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
"""Largest number of each 8-bit type."""
_SMALLEST = torch.finfo(torch.float32).tiny


class Quantised(NamedTuple):
    """Matrix in 8 bits with a scale per block.

    Element i, j is ``q[i, j] * scale[j // 128, i]`` with 1 x 128 blocks, and ``q[i, j] * scale[j // 128, i // 128]``
    with 128 x 128 blocks.
    """

    q: torch.Tensor
    """``[M, K]``."""
    scale: torch.Tensor
    """float32, ``[blocks of K, M]`` with 1 x 128 blocks, or ``[blocks of K, blocks of M]`` with 128 x 128 blocks."""

    def wide(self) -> torch.Tensor:
        """Return the elements ``[M, K]`` of the matrix, multiplied by their scales, in float32."""
        rows, columns = self.q.shape
        scale = self.scale.T.repeat_interleave(BLOCK, 1)[:, :columns]
        if self.scale.shape[1] != rows:
            scale = scale.repeat_interleave(BLOCK, 0)[:rows]
        return self.q.float() * scale


def blocks(width: int) -> int:
    """Return the number of blocks of 128 that cover a width."""
    return -(-width // BLOCK)


def quantised(x: torch.Tensor, dtype: torch.dtype, *, square: bool, power_of_two: bool) -> Quantised:
    """Return ``x [M, K]`` in 8 bits with a scale per block of 1 x 128, or of 128 x 128 with ``square``.

    The result equals the kernel's bit for bit. Without ``power_of_two`` the scale maps the largest magnitude in a block
    to the largest number of the type. Blocks of zeros have the scale 1. Blocks with an infinity or a NaN have a NaN
    scale, so that every product with such a block is NaN.
    """
    rows, columns = x.shape
    wide = x.float()
    down, along = (BLOCK if square else 1), BLOCK
    padded = torch.nn.functional.pad(wide, (0, -columns % along, 0, -rows % down))
    # unflatten(-1, …) could not compute the number of blocks of an empty matrix.
    tiles = padded.view(-(-rows // down), down, blocks(columns), along)
    finite = tiles.isfinite()
    largest = tiles.abs().where(finite, 0.0).amax((1, 3))
    scale = (largest * (1.0 / torch.tensor(LARGEST[dtype], dtype=torch.float32, device=x.device))).clamp_min(_SMALLEST)
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scale = scale.where(largest > 0, 1.0)
    sound = finite.all(3).all(1)
    factor = scale.reciprocal().where(sound, 0.0)
    narrow = tiles.where(finite, 0.0) * factor[:, None, :, None]
    narrow = narrow.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous().to(dtype)
    return Quantised(narrow, scale.where(sound, torch.nan).T.contiguous())

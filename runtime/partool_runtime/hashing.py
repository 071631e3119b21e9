"""Hashes of 32-bit integers, elementwise: numbers that look random and depend on nothing but their inputs."""

from __future__ import annotations

import torch


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Replace 32-bit integers by their hashes, in place, and return them.

    The hash is lowbias32 of C. Wellons, https://nullprogram.com/blog/2018/07/31/.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        upper = x.bitwise_right_shift(shift).bitwise_and_(2 ** (32 - shift) - 1)  # the shift copies the sign
        x.bitwise_xor_(upper).mul_(factor)
    return x


def signed(number: int) -> int:
    """Return the lowest 32 bits of a number as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31

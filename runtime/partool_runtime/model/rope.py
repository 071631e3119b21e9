"""Rotary position embedding (Su et al., arXiv 2104.09864); pairs come from the two halves of a head, as in GPT-NeoX.

The tables are cached tensors and not buffers, so that they need not exist on the meta device, and casting the model to
a 16-bit type does not change their type.
"""

from __future__ import annotations

import math

import torch

from partool.spec.model import ModelConfig, RopeScaling
from partool_runtime.model.norm import wide_dtype

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each ``[S, D]``; D is the head dimension."""


def frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the angle by which one position rotates each pair of dimensions, in radians, ``[D/2]``, float64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    return plain if config.rope_scaling is None else _scaled(plain, config.rope_scaling)


def _scaled(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretch wavelengths as in Llama 3.1 (arXiv 2407.21783; ``rope_type: llama3``).

    Long wavelengths are multiplied by the factor, short ones stay, and frequencies in between are blended linearly
    in the number of turns within the original context.
    """
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low == high:
        return torch.where(turns < low, plain / scaling.factor, plain)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor


def tables(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Return cosine and sine for positions 0 … length-1, in float32 or wider.

    The angles are computed in float64 on the CPU, so every device gets the same bits.
    """
    with torch.device("cpu"):
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies(config)).repeat(1, 2)
    wide = wide_dtype(dtype)
    return angles.cos().to(device=device, dtype=wide), angles.sin().to(device=device, dtype=wide)


def rotate(x_BNSD: torch.Tensor, rope: Tables) -> torch.Tensor:
    """Rotate queries or keys by their positions, in the tables' type; the result has the type of the input."""
    cos_SD, sin_SD = rope
    wide = x_BNSD.to(cos_SD.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD).to(x_BNSD.dtype)

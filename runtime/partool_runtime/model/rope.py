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
"""Cosine and sine, each ``[S, D]``; D is the rotated width of a head."""


def frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the angle by which one position rotates each pair of dimensions, in radians, ``[D/2]``, float64."""
    exponents = torch.arange(0, config.rotated, 2, dtype=torch.float64) / config.rotated
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    return _by_yarn(plain, config.rope_theta, scaling) if scaling.kind == "yarn" else _by_llama3(plain, scaling)


def _by_yarn(plain: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Scale frequencies by YaRN's NTK-by-parts (Peng et al., arXiv 2309.00071, section 3.2).

    Pairs of dimensions that turn more than ``beta_fast`` times within the original context keep their frequency, those
    that turn less than ``beta_slow`` times are divided by the factor, and a ramp over the pairs in between blends both.
    As in DeepSeek's and transformers' code, the ramp's ends are rounded outwards to whole pairs, unless ``truncate`` is
    false.
    """
    pairs = len(plain)

    def pair_of(turns: float) -> float:
        return pairs * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    divided = ramp.clamp(0.0, 1.0)
    return plain * (1.0 - divided) + plain / scaling.factor * divided


def table_scale(scaling: RopeScaling | None) -> float:
    """Return the number by which rotated queries and keys are multiplied: 1, except for YaRN (section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def score_scale(config: ModelConfig) -> float | None:
    """Return the number by which attention multiplies q · k; None for 1 / √D, the usual scale.

    In latent attention YaRN's ``mscale_all_dim`` scales all scores, since only a part of a head is rotated
    (DeepSeek-V2, arXiv 2405.04434, section 3.1.4; DeepSeek's published code squares the factor).
    """
    scaling = config.rope_scaling
    if config.mla is None or scaling is None or scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return None
    factor = _mscale(scaling.factor, scaling.mscale_all_dim)
    return factor * factor / math.sqrt(config.mla.qk_head_dim)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _by_llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
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
    wide, scale = wide_dtype(dtype), table_scale(config.rope_scaling)
    cos_SD, sin_SD = ((scale * table).to(device=device, dtype=wide) for table in (angles.cos(), angles.sin()))
    return cos_SD, sin_SD


def rotate(x_BNSD: torch.Tensor, rope: Tables) -> torch.Tensor:
    """Rotate queries or keys by their positions, in the tables' type; the result has the type of the input."""
    cos_SD, sin_SD = rope
    wide = x_BNSD.to(cos_SD.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD).to(x_BNSD.dtype)

"""Initial weights without a file: drawn from a seed, or constants.

Every value depends only on the seed and the parameter's name and shape: a rank that holds a few rows or
columns draws the rows that contain them, and every layout starts with the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch

from partool.layout.adapters import A
from partool.layout.parameters import LOGIT_BIAS, SINKS
from partool.spec.model import ModelConfig
from partool_runtime.hashing import mixed

Shape = tuple[int, ...]
BlockSource = Callable[[str, Shape, Shape, Shape], torch.Tensor]
"""Function from (parameter name, the parameter's whole shape, a block's offsets, the block's shape) to the block, on
the CPU.
"""

BLOCK_ELEMENTS = 2**16
"""Number of elements drawn from one generator, rounded down to whole rows; changing it changes all first weights."""


def init_source(config: ModelConfig, seed: int) -> BlockSource:
    """Return the source of fresh weights, in float32.

    Matrices are normal with ``init_std``. For matrices that write into the residual stream (``o``, ``down``) the
    standard deviation is divided by √(2·layers), since there are 2·layers such additions (GPT-2, Radford et al. 2019,
    section 2.3). Norms are one, biases and sinks zero.
    """
    return partial(_block, config=config, values=partial(_normal, seed=seed))


def adapter_source(seed: int) -> BlockSource:
    """Return the source of fresh adapters, in float32: A is uniform within ±1/√columns, all else is zero.

    The bound is that of Kaiming's uniform distribution with a = √5, which PEFT draws A from.
    """

    def block(name: str, shape: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
        if not name.endswith(f".{A}"):
            return torch.zeros(sizes)
        uniform = _drawn(torch.rand, name, shape, offsets, sizes, seed=seed)
        return uniform.mul_(2.0).sub_(1.0).mul_(shape[1] ** -0.5)

    return block


def dummy_source(config: ModelConfig) -> BlockSource:
    """Return a source of cheap noise for trials, in float32; it is the same for every seed.

    An element is a hash of the parameter's name and of the element's indices, so any block is computed by itself.
    Matrices are uniform, with the mean and the standard deviations of :func:`init_source`; norms are one, biases zero.
    """
    return partial(_block, config=config, values=_noise)


def block_rows(shape: Shape) -> int:
    """Return the number of rows of a parameter that one generator draws."""
    return max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))


_ZEROS = (".bias", f".{LOGIT_BIAS}", f".{SINKS}")
"""Endings of the names of vectors that begin at zero."""


def _block(
    name: str,
    shape: Shape,
    offsets: Shape,
    sizes: Shape,
    *,
    config: ModelConfig,
    values: Callable[[str, Shape, Shape, Shape], torch.Tensor],
) -> torch.Tensor:
    if len(shape) <= 1:
        return torch.full(sizes, 0.0 if name.endswith(_ZEROS) else 1.0)
    residual = name.endswith((".o.weight", ".down.weight"))
    std = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    return values(name, shape, offsets, sizes).mul_(std)


def _normal(name: str, shape: Shape, offsets: Shape, sizes: Shape, *, seed: int) -> torch.Tensor:
    """Return a block of a parameter from the standard normal distribution."""
    return _drawn(torch.randn, name, shape, offsets, sizes, seed=seed)


def _drawn(
    draw: Callable[..., torch.Tensor], name: str, shape: Shape, offsets: Shape, sizes: Shape, *, seed: int
) -> torch.Tensor:
    """Return a block of a parameter whose elements ``draw`` draws, in whole rows."""
    start, stop = offsets[0], offsets[0] + sizes[0]
    columns = tuple(slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True))
    each = block_rows(shape)
    drawn = []
    for block in range(start // each, -(-stop // each)):
        first = block * each
        generator = torch.Generator().manual_seed(_block_seed(seed, name, block))
        rows = draw((min(each, shape[0] - first), *shape[1:]), generator=generator, dtype=torch.float32)
        drawn.append(rows[(slice(max(start - first, 0), stop - first), *columns)])
    return torch.cat(drawn) if drawn else torch.empty(sizes)


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}\0{name}\0{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # the seed has 63 bits, without a sign


def _noise(name: str, shape: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
    """Return a block of a parameter from the uniform distribution of mean 0 and variance 1, by a hash of the indices.

    Each dimension gives a key per index; the hash mixes the keys of an element's indices.
    """
    digest = hashlib.sha256(name.encode()).digest()
    keys = torch.zeros((1,) * len(shape), dtype=torch.int32)
    for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        salt = int.from_bytes(digest[4 * dim : 4 * dim + 4], "little", signed=True)
        index = torch.arange(first, first + size, dtype=torch.int32)
        keys = keys ^ mixed(index ^ salt).view(-1, *(1,) * (len(shape) - dim - 1))
    return mixed(keys).to(torch.float32).mul_(math.sqrt(3.0) / 2**31)

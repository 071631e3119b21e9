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

from partool.spec.model import ModelConfig

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
    section 2.3). Norms are one, biases zero.
    """
    return partial(_block, config=config, values=partial(_normal, seed=seed))


def dummy_source(config: ModelConfig) -> BlockSource:
    """Return a source of constants for dry runs: fast, the same for every seed; neighbouring rows and columns differ.

    Row r, column c of a matrix is ``std · (((31·r + 17·c) mod 13) − 6) / √14``, whose standard deviation over a period
    of 13 is the ``std`` of :func:`init_source`; norms are one, biases zero.
    """
    return partial(_block, config=config, values=_pattern)


def block_rows(shape: Shape) -> int:
    """Return the number of rows of a parameter that one generator draws."""
    return max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))


def _block(
    name: str,
    shape: Shape,
    offsets: Shape,
    sizes: Shape,
    *,
    config: ModelConfig,
    values: Callable[[str, Shape, int, int], torch.Tensor],
) -> torch.Tensor:
    if len(shape) <= 1:
        return torch.full(sizes, 0.0 if name.endswith(".bias") else 1.0)
    residual = name.endswith((".o.weight", ".down.weight"))
    std = config.init_std / math.sqrt(2 * config.layers) if residual else config.init_std
    columns = tuple(slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True))
    return values(name, shape, offsets[0], offsets[0] + sizes[0])[(slice(None), *columns)] * std


def _normal(name: str, shape: Shape, start: int, stop: int, *, seed: int) -> torch.Tensor:
    """Return rows ``start`` to ``stop`` of a parameter, drawn block by block from the standard normal distribution."""
    each = block_rows(shape)
    drawn = []
    for block in range(start // each, -(-stop // each)):
        first = block * each
        generator = torch.Generator().manual_seed(_block_seed(seed, name, block))
        whole = torch.randn((min(each, shape[0] - first), *shape[1:]), generator=generator, dtype=torch.float32)
        drawn.append(whole[max(start - first, 0) : stop - first])
    return torch.cat(drawn) if drawn else torch.empty((0, *shape[1:]))


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}\0{name}\0{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # the seed has 63 bits, without a sign


def _pattern(name: str, shape: Shape, start: int, stop: int) -> torch.Tensor:
    del name
    row = torch.arange(start, stop)[:, None]
    column = torch.arange(math.prod(shape[1:]))[None, :]
    values = ((31 * row + 17 * column) % 13 - 6) / math.sqrt(14.0)
    return values.reshape(-1, *shape[1:]).to(torch.float32)

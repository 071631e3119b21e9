"""How folders store matrices: the order of rotated rows, blocks in 8 bits, and layers that are not trained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import torch

from partool.spec.model import Mla, ModelConfig
from partool_runtime.errors import ConfigurationError

Rotated = Literal["heads", "shared"]
SCALES = "_scale_inv"
"""Ending of the name of the tensor with the scales of an 8-bit matrix, after the matrix's own name."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def row_order(mla: Mla, rotated: Rotated, rows: int) -> torch.Tensor:
    """Return the stored row of each of partool's ``rows`` rows, int64, where folders store rotated rows as pairs.

    RoPE turns row i of a rotated part with row i + R/2 in partool, and row 2i with row 2i + 1 in DeepSeek's code.
    Scores of queries and keys do not depend on the order, as long as both have the same.
    """
    plain = mla.nope_head_dim if rotated == "heads" else mla.kv_rank
    unit, turned = plain + mla.rope_head_dim, torch.arange(mla.rope_head_dim)
    of_unit = torch.cat([torch.arange(plain), plain + torch.cat([turned[0::2], turned[1::2]])])
    return (torch.arange(0, rows, unit)[:, None] + of_unit).flatten()


def dequantized(
    stored: torch.Tensor, scales: torch.Tensor, offsets: tuple[int, ...], block: tuple[int, int]
) -> torch.Tensor:
    """Return a part of an 8-bit matrix in float32: every block of ``block`` rows and columns times its scale.

    ``offsets`` is the place of ``stored`` in the matrix, ``scales`` are those of the whole matrix (DeepSeek-V3, arXiv
    2412.19437, section 3.3.2).
    """
    rows, columns = (
        torch.arange(at, at + size) // width for at, size, width in zip(offsets, stored.shape, block, strict=True)
    )
    return stored.float() * scales.float()[rows[:, None], columns[None, :]]


def block_of(config: Any) -> tuple[int, int] | None:
    """Return rows and columns of the blocks in which a ``config.json`` says that weights are quantized; None if not.

    Raises ConfigurationError PT620 for weights that are quantized in another way.
    """
    how = config.get("quantization_config") if isinstance(config, dict) else None
    if how is None:
        return None
    block = how.get("weight_block_size") if isinstance(how, dict) else None
    if not isinstance(how, dict) or how.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        raise ConfigurationError("PT620", "the folder's weights are quantized in a way that cannot be read")
    return int(block[0]), int(block[1])


def beyond(names: Iterable[str], layers: int) -> list[str]:
    """Return the names of tensors of layers that the model does not have, such as those for multi-token prediction."""
    return [name for name in names if (match := _LAYER.search(name)) is not None and int(match[1]) >= layers]


def copies_of(config: ModelConfig) -> dict[str, str]:
    """Return the tensors that folders store once more with each module of a further token: copy → original."""
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    copies = {}
    for layer in range(config.layers, config.blocks):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return copies

"""Which way of multiplying, looking up and normalising each part of partool's decoder gets from tensor parallelism.

A form of tensor parallelism is a :class:`Sharding`, which is data; :func:`apply_sharding` sets it in the model's
attributes. Which ranks hold which part of a parameter is the plan's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from partool_runtime.model import Block, Decoder, DecoderParts
from partool_runtime.model.attention import AttentionLayout, SelfAttention, Tokens
from partool_runtime.model.decoder import HasLoss, HeadLoss
from partool_runtime.model.embedding import Lookup
from partool_runtime.model.ffn import FeedForward
from partool_runtime.model.norm import NormFunction
from partool_runtime.model.projection import InputProducts, OutputProduct


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """What multiplies and normalises in a layer."""

    queries_keys_values: InputProducts
    of_heads: OutputProduct
    gate_up: InputProducts
    down: OutputProduct
    keys_shared_part: Callable[[torch.Tensor], torch.Tensor] | None = None
    """``LatentAttention.enter``."""
    norm: NormFunction | None = None
    """None if norms work on whole widths."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """One form of tensor parallelism, for this rank."""

    layer: Callable[[Block], LayerSharding]
    """Returns what a layer gets; layers that get the same should get the same objects, to be compiled once."""
    tokens: Lookup
    positions: Lookup | None
    """None if each rank embeds the positions of all tokens."""
    loss: HeadLoss
    norm: NormFunction | None = None
    """For the final norm; see :class:`LayerSharding`."""


def apply_sharding(model: Decoder | DecoderParts, sharding: Sharding) -> None:
    """Set a form of tensor parallelism in a decoder, or in a pipeline rank's stages, in place.

    The parameters must already be this rank's parts. Layers of experts are the matter of expert parallelism.
    """
    for _, module in model.blocks():
        block = cast(Block, module)
        shard_layer(block, sharding.layer(block))
    if model.embed is not None:
        model.embed.lookup = sharding.tokens
    if model.position is not None:
        model.position.lookup = sharding.positions
    if model.final_norm is not None:
        model.final_norm.by = sharding.norm
    if model.loss_module is not None:
        cast(HasLoss, model.loss_module).loss = sharding.loss


def shard_layer(block: Block, sharding: LayerSharding) -> None:
    """Set the attributes of one layer, but for those of its experts."""
    attention = block.attention
    if attention.o.weight.numel() == 0:
        attention.core = no_heads
    attention.inputs, attention.output = sharding.queries_keys_values, sharding.of_heads
    if not isinstance(attention, SelfAttention):
        attention.enter = sharding.keys_shared_part
    if block.ffn is not None:
        shard_network(block.ffn, sharding)
    for norm in (block.attention_norm, block.ffn_norm):
        norm.by = sharding.norm


def shard_network(ffn: FeedForward, sharding: LayerSharding) -> None:
    """Set the attributes of a feed-forward network."""
    ffn.inputs, ffn.output = sharding.gate_up, sharding.down


def no_heads(
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    layout: AttentionLayout,
    tokens: Tokens | None = None,
    *,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute :func:`partool_runtime.model.attend` for zero heads, which device kernels may not support."""
    del layout, tokens, sinks_N
    return v_BKSD + (q_BNSD.sum() + k_BKSD.sum())

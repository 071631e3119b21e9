"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are expanded from one latent vector per token, queries from another one or from the hidden
state. RoPE rotates a separate part of each query and one part of the key, which all heads share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from partool.spec.model import Mla, ModelConfig
from partool_runtime.model.attention import (
    Attend,
    Context,
    HeadsExchange,
    SelfAttention,
    attend,
    attention_layout,
    heads_of,
)
from partool_runtime.model.norm import RMSNorm
from partool_runtime.model.projection import SEPARATE, InputProducts, Linear, OutputProduct, alone
from partool_runtime.model.rope import rotate

LATENT_EPS = 1e-6
"""Constant in the norms of latents; DeepSeek's published code and transformers use it whatever the other norms use."""


class LatentAttention(nn.Module):
    """Down-projections, norms of the latents, expansion to heads, rotation, attention and the output projection."""

    def __init__(self, config: ModelConfig, mla: Mla, layer: int) -> None:
        super().__init__()
        self.mla = mla
        self.core: Attend = attend
        """Function that computes attention; methods of sequence parallelism replace it, recomputation wraps it."""
        self.inputs: InputProducts = SEPARATE
        """Multiplies by the projections that expand latents to heads, or the hidden state to queries."""
        self.output: OutputProduct = alone
        """Multiplies by the projection of all heads' results."""
        self.enter: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Gives the keys' shared part, which no projection expands, to this rank's heads; None if it has all heads."""
        self.exchange: HeadsExchange[LatentAttention] | None = None
        """How ranks that share sequences exchange tokens for heads around the core; None if they exchange none."""
        self.layout = attention_layout(config, layer)
        hidden, queries = config.hidden, config.heads * mla.qk_head_dim
        self.compresses_queries = mla.q_rank is not None
        if mla.q_rank is None:
            self.q = Linear(hidden, queries, bias=config.qkv_bias)
        else:
            self.q_a = Linear(hidden, mla.q_rank, bias=config.qkv_bias)
            self.q_a_norm = RMSNorm(mla.q_rank, LATENT_EPS)
            self.q_b = Linear(mla.q_rank, queries, bias=False)
        self.kv_a = Linear(hidden, mla.kv_rank + mla.rope_head_dim, bias=config.qkv_bias)
        self.kv_a_norm = RMSNorm(mla.kv_rank, LATENT_EPS)
        self.kv_b = Linear(mla.kv_rank, config.heads * (mla.nope_head_dim + mla.v_head_dim), bias=False)
        self.o = Linear(config.heads * mla.v_head_dim, hidden, bias=config.out_bias)

    def forward(self, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        if self.exchange is not None:
            return self.exchange(self, x_BSH, context)
        q_BNSD, k_BNSD, v_BNSV = self.heads(x_BSH, context)
        out_BNSV = self.core(q_BNSD, k_BNSD, v_BNSV, self.layout, context.tokens)
        return self.output(out_BNSV.transpose(1, 2).flatten(-2), self.o)

    def heads(self, x_BSH: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys ``[B, N, S, D]``, and values ``[B, N, S, V]``."""
        q_BSX, kv_BSX, rope_BSR = self.projected(x_BSH)
        return self.queries(q_BSX, context), self.keys(kv_BSX, rope_BSR, context), self.values(kv_BSX)

    def queries(self, q_BSX: torch.Tensor, context: Context) -> torch.Tensor:
        """Return projected queries as heads ``[B, N, S, D]``; the last part of each head is rotated."""
        q_BSND = heads_of(q_BSX, self.mla.qk_head_dim)
        if context.rope is None:
            return q_BSND.transpose(1, 2)
        plain_BSNP, rope_BSNR = q_BSND.tensor_split([self.mla.nope_head_dim], dim=-1)
        rope_BSNR = rotate(rope_BSNR.transpose(1, 2), context.rope).transpose(1, 2)
        return torch.cat((plain_BSNP, rope_BSNR), dim=-1).transpose(1, 2)

    def keys(self, kv_BSX: torch.Tensor, rope_BSR: torch.Tensor, context: Context) -> torch.Tensor:
        """Return keys as heads ``[B, N, S, D]``: a part per head, and the rotated part that all heads share."""
        plain_BSNP = self._expanded(kv_BSX)[..., : self.mla.nope_head_dim]
        rope_BSR = rope_BSR if context.rope is None else rotate(rope_BSR, context.rope)
        rope_BSNR = rope_BSR[:, :, None].expand(*plain_BSNP.shape[:3], -1)
        return torch.cat((plain_BSNP, rope_BSNR), dim=-1).transpose(1, 2)

    def values(self, kv_BSX: torch.Tensor) -> torch.Tensor:
        """Return values as heads ``[B, N, S, V]``.

        They are a copy: a view would keep the keys' parts of ``kv_BSX`` in memory until the backward pass.
        """
        return self._expanded(kv_BSX)[..., self.mla.nope_head_dim :].contiguous().transpose(1, 2)

    def projected(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, the product of keys' parts and values, and keys' shared part before its rotation.

        They are ``[B, S, N · D]``, ``[B, S, N · (P + V)]`` and ``[B, S, R]`` of all tokens, where P and R are the
        widths of a key's two parts. Down-projections and norms of the latents are whole on every tensor rank, and work
        on the rank's share of the tokens where norms do: latents are exchanged, which are narrower than the residual
        stream.
        """
        latent_BSC, rope_BSR = self.latent(x_BSH)
        if self.compresses_queries:
            (q_BSX,) = self.inputs(self.q_latent(x_BSH), (self.q_b,))
        else:
            (q_BSX,) = self.inputs(x_BSH, (self.q,))
        (kv_BSX,) = self.inputs(latent_BSC, (self.kv_b,))
        return q_BSX, kv_BSX, rope_BSR if self.enter is None else self.enter(rope_BSR)

    def q_latent(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the normalised latents of queries, ``[B, S, q_rank]``."""
        latent: torch.Tensor = self.q_a_norm(self.q_a(x_BSH))
        return latent

    def latent(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised latents of keys and values ``[B, S, kv_rank]``, and the shared part of keys."""
        latent_BSC, rope_BSR = self.kv_a(x_BSH).tensor_split([self.mla.kv_rank], dim=-1)
        return self.kv_a_norm(latent_BSC), rope_BSR

    def _expanded(self, kv_BSX: torch.Tensor) -> torch.Tensor:
        return heads_of(kv_BSX, self.mla.nope_head_dim + self.mla.v_head_dim)


def make_attention(config: ModelConfig, layer: int) -> SelfAttention | LatentAttention:
    """Return the attention of a layer, counted from 0, of the kind that ``config`` selects."""
    return SelfAttention(config, layer) if config.mla is None else LatentAttention(config, config.mla, layer)

"""Causal self-attention with grouped queries (Ainslie et al., arXiv 2305.13245) and sliding windows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from partool.spec.model import ModelConfig
from partool_runtime.model.norm import RMSNorm
from partool_runtime.model.rope import Tables, rotate

_HALF = (torch.float16, torch.bfloat16)


class AttentionLayout(NamedTuple):
    """Which positions see which, for implementations of :func:`attend` that need no mask."""

    window: int | None
    """Positions that one sees, itself included; None sees all earlier ones."""


class Context:
    """What all layers share in one pass. An opaque object, so that no wrapper casts its tensors to a narrow type."""

    def __init__(self, rope: Tables | None, window_mask_SS: torch.Tensor | None) -> None:
        self.rope = rope
        self.window_mask_SS = window_mask_SS


def attend(
    q_BNSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    layout: AttentionLayout,
    mask_SS: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax(q kᵀ / √D) v, causal, as ``[B, N, S, D]``.

    K key-value heads serve N query heads, N a multiple of K. ``mask_SS`` (boolean, True is seen) stands
    for the window of ``layout``; None means plain causal attention.
    """
    del layout
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    if grouped and q_BNSD.is_cuda and (mask_SS is not None or q_BNSD.dtype not in _HALF):
        # Only the flash kernel takes fewer key heads, and it takes neither masks nor wide types: without copies the
        # fallback would hold all N·S·S scores.
        copies = q_BNSD.shape[1] // k_BKSD.shape[1]
        k_BKSD, v_BKSD = (heads.repeat_interleave(copies, dim=1) for heads in (k_BKSD, v_BKSD))
        grouped = False
    return F.scaled_dot_product_attention(
        q_BNSD,
        k_BKSD,
        v_BKSD,
        attn_mask=mask_SS,
        is_causal=mask_SS is None,
        enable_gqa=grouped,
    )


def window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the boolean ``[S, S]`` mask in which each position sees the last ``window`` ones, itself included."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _heads(x_BSX: torch.Tensor, head_dim: int) -> torch.Tensor:
    # Not unflatten(-1, (-1, head_dim)): a tensor rank may have no head at all.
    return x_BSX.view(*x_BSX.shape[:-1], x_BSX.shape[-1] // head_dim, head_dim)


class SelfAttention(nn.Module):
    """Projections, optional norms of queries and keys per head, rotation, :func:`attend`, output projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.core = attend
        """What computes attention; recomputation wraps it."""
        self.layout = AttentionLayout(config.window if config.attention_kind(layer) == "sliding" else None)
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden, queries, bias=config.qkv_bias)
        self.k = nn.Linear(config.hidden, keys, bias=config.qkv_bias)
        self.v = nn.Linear(config.hidden, keys, bias=config.qkv_bias)
        self.o = nn.Linear(queries, config.hidden, bias=config.out_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        q_BSX, k_BSX, v_BSX = self.inputs(x_BSH)
        q_BSND, k_BSKD, v_BSKD = (_heads(x_BSX, self.head_dim) for x_BSX in (q_BSX, k_BSX, v_BSX))
        if self.qk_norm:
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        q_BNSD, k_BKSD, v_BKSD = (heads.transpose(1, 2) for heads in (q_BSND, k_BSKD, v_BSKD))
        if context.rope is not None:
            q_BNSD, k_BKSD = rotate(q_BNSD, context.rope), rotate(k_BKSD, context.rope)
        mask_SS = context.window_mask_SS if self.layout.window is not None else None
        out_BNSD = self.core(q_BNSD, k_BKSD, v_BKSD, self.layout, mask_SS)
        return self.output(out_BNSD.transpose(1, 2).flatten(-2))

    def inputs(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, each ``[B, S, heads · D]``; tensor parallelism puts its own here."""
        return self.q(x_BSH), self.k(x_BSH), self.v(x_BSH)

    def output(self, heads_BSX: torch.Tensor) -> torch.Tensor:
        """Map the results of all heads ``[B, S, heads · D]`` to ``[B, S, H]``; likewise."""
        out: torch.Tensor = self.o(heads_BSX)
        return out

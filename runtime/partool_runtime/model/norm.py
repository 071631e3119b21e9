"""Normalisation of the hidden state; its statistics are computed in float32 or wider."""

from __future__ import annotations

import torch
from torch import nn

from partool.spec.model import ModelConfig


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for statistics and sums of values of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """Root-mean-square normalisation without centring (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; the result has the type of ``x``."""
        wide = x.to(wide_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a new norm over the hidden size, of the kind that ``config`` selects."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, config.norm_eps)
    # This norm of torch computes its statistics in float32 or wider by itself.
    return nn.LayerNorm(config.hidden, eps=config.norm_eps)

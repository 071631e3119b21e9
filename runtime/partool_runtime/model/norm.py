"""Normalisation of the hidden state; its statistics are computed in float32 or wider."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from partool.spec.model import ModelConfig


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for statistics and sums of values of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class NormFunction(Protocol):
    """How a norm is computed: by a kernel, or from statistics that ranks exchange."""

    def __call__(self, norm: RMSNorm | LayerNorm, x: torch.Tensor, /) -> torch.Tensor:
        """Return ``x`` normalised with the parameters of ``norm``, in the type of ``x``."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation without centring (Zhang and Sennrich, arXiv 1910.07467)."""

    by: NormFunction | None = None
    """What computes the norm; None means :meth:`plain`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; the result has the type of ``x``."""
        return self.plain(x) if self.by is None else self.by(self, x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise by torch's operators."""
        wide = x.to(wide_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class LayerNorm(nn.LayerNorm):
    """torch's norm with centring, which computes its statistics in float32 or wider by itself."""

    by: NormFunction | None = None
    """What computes the norm; None means :meth:`plain`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimensions; the result has the type of ``x``."""
        return self.plain(x) if self.by is None else self.by(self, x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise by torch's operator."""
        return super().forward(x)


def as_own(norm: nn.Module) -> RMSNorm | LayerNorm:
    """Return a norm as one of the classes here; torch's ``LayerNorm``, as in models of transformers, becomes ours."""
    if type(norm) is nn.LayerNorm:
        norm.__class__ = LayerNorm
    assert isinstance(norm, RMSNorm | LayerNorm)
    return norm


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Return a new norm over the hidden size, of the kind that ``config`` selects."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, config.norm_eps)
    return LayerNorm(config.hidden, eps=config.norm_eps)

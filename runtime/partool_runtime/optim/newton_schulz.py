"""Orthogonalisation of matrices by the quintic Newton–Schulz iteration of Muon."""

from __future__ import annotations

import math

import torch

from partool.layout.matrices import NEWTON_SCHULZ_STEPS
from partool.spec.training import NewtonSchulz

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵ (Jordan et al., kellerjordan.github.io/posts/muon), those of ``torch.optim.Muon``."""
_LEAST_NORM = 1e-7
"""Smallest norm by which a matrix is divided, that of ``torch.optim.Muon``."""
_RMS = 0.2
"""Root mean square of AdamW's updates, which Muon's are scaled to (Liu et al., arXiv 2502.16982, section 2.2)."""


def direction_type(working: torch.dtype, asked: NewtonSchulz) -> torch.dtype:
    """Return the type in which matrices are sent and orthogonalised; ``working`` is the type of master weights."""
    return torch.bfloat16 if asked == "bf16" else working


def orthogonalised(direction: torch.Tensor) -> torch.Tensor:
    """Return U S' Vᵀ for a matrix U S Vᵀ, where all of S' are near 1; the matrix may be overwritten.

    The operators, their order and their number are those of ``torch.optim.Muon``, so that bits are equal.
    """
    a, b, c = COEFFICIENTS
    tall = direction.size(0) > direction.size(1)
    x = direction.T if tall else direction
    x.div_(x.norm().clamp(min=_LEAST_NORM))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if tall else x


def scaled_rate(lr: float, rows: int, columns: int) -> float:
    """Return the learning rate that gives a matrix's update the root mean square of AdamW's, whatever its shape."""
    return lr * (_RMS * math.sqrt(max(rows, columns)))

"""The head and its loss in one place, so that the logits of a long batch never exist at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_runtime.deferral import linear
from partool_runtime.model._wide import wide_dtype

IGNORED = -100
"""Label of a position that does not count."""
CHUNK_LOGITS = 2**26
"""Logits (rows times vocabulary) held at once; a larger batch is worked through in chunks of rows."""


def loss(
    hidden_BSH: torch.Tensor,
    head_weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    chunk_logits: int = CHUNK_LOGITS,
    *,
    bias_V: torch.Tensor | None = None,
    tile: int = 0,
) -> torch.Tensor:
    """Return the sum of the cross entropies of all labelled positions, a scalar in float32 or wider.

    A sum and no mean, so that the caller can divide by the tokens of the whole step over all ranks. Above
    ``chunk_logits`` logits the backward pass computes them a second time, chunk by chunk: two extra units of matrix
    work in eight, in exchange for memory that does not grow with the batch. ``tile`` gives the positions whose logits
    exist at once instead.
    """
    hidden_TH, labels_T = hidden_BSH.flatten(0, -2), labels_BS.flatten()
    rows = tile or max(1, chunk_logits // head_weight_VH.shape[0])
    if hidden_TH.shape[0] <= rows:
        return _cross_entropy(hidden_TH, head_weight_VH, bias_V, labels_T)
    chunks = _Chunks(labels_T, rows)
    total: torch.Tensor = _ChunkedLoss.apply(hidden_TH, head_weight_VH, bias_V, chunks)  # type: ignore[no-untyped-call]
    return total


def _logits(hidden_TH: torch.Tensor, head_weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    return linear(hidden_TH, head_weight_VH, bias_V).to(wide_dtype(hidden_TH.dtype))


def _cross_entropy(
    hidden_TH: torch.Tensor, head_weight_VH: torch.Tensor, bias_V: torch.Tensor | None, labels_T: torch.Tensor
) -> torch.Tensor:
    logits_TV = _logits(hidden_TH, head_weight_VH, bias_V)
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")


class _Chunks(NamedTuple):
    labels: torch.Tensor
    """``[T]``."""
    rows: int
    """Positions whose logits exist at once."""


class _ChunkedLoss(torch.autograd.Function):
    """:func:`_cross_entropy` over chunks of rows, forward and backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TH: torch.Tensor,
        head_weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        chunks: _Chunks,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TH, head_weight_VH, bias_V, chunks.labels)  # type: ignore[arg-type]
        ctx.rows = chunks.rows  # type: ignore[attr-defined]
        total = hidden_TH.new_zeros((), dtype=wide_dtype(hidden_TH.dtype))
        parts = (torch.split(tensor, chunks.rows) for tensor in (hidden_TH, chunks.labels))
        for hidden_CH, labels_C in zip(*parts, strict=True):
            total += _cross_entropy(hidden_CH, head_weight_VH, bias_V, labels_C)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, head_weight_VH, bias_V, labels_T = ctx.saved_tensors
        needs_hidden, needs_head, needs_bias, _ = ctx.needs_input_grad
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # Summed over many chunks, hence wide.
        grad_head_VH = torch.zeros_like(head_weight_VH, dtype=grad.dtype) if needs_head else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=grad.dtype) if needs_bias else None
        for start in range(0, hidden_TH.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            # No name for the logits, which would keep those of two chunks.
            grad_logits_CV = _grad_logits(_logits(hidden_TH[part], head_weight_VH, bias_V), labels_T[part], grad)
            grad_logits_CV = grad_logits_CV.to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                torch.mm(grad_logits_CV, head_weight_VH, out=grad_hidden_TH[part])
            if grad_head_VH is not None:
                grad_head_VH += grad_logits_CV.T @ hidden_TH[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
        return grad_hidden_TH, _narrow(grad_head_VH, head_weight_VH), _narrow(grad_bias_V, head_weight_VH), None


def _narrow(wide: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if wide is None else wide.to(like.dtype)


def _grad_logits(logits_CV: torch.Tensor, labels_C: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return (softmax − one-hot) · grad, zero where the label is ignored."""
    counted_C = labels_C != IGNORED
    probabilities_CV = torch.softmax(logits_CV, dim=-1)
    target_C1 = labels_C.where(counted_C, 0)[:, None]
    probabilities_CV.scatter_add_(1, target_C1, probabilities_CV.new_full(target_C1.shape, -1.0))
    # Scaled before any cast: in float16 the unscaled probabilities of a large vocabulary would vanish.
    return probabilities_CV * (grad * counted_C)[:, None]

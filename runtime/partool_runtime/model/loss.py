"""The head and its loss in one place, so that the logits of a long batch never exist at once."""

from __future__ import annotations

from typing import Any

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
    hidden_BSH: torch.Tensor, head_weight_VH: torch.Tensor, labels_BS: torch.Tensor, chunk_logits: int = CHUNK_LOGITS
) -> torch.Tensor:
    """Return the sum of the cross entropies of all labelled positions, a scalar in float32 or wider.

    A sum and no mean, so that the caller can divide by the tokens of the whole step over all ranks. Above
    ``chunk_logits`` logits the backward pass computes them a second time, chunk by chunk: two extra units of matrix
    work in eight, in exchange for memory that does not grow with the batch.
    """
    hidden_TH, labels_T = hidden_BSH.flatten(0, -2), labels_BS.flatten()
    rows = max(1, chunk_logits // head_weight_VH.shape[0])
    if hidden_TH.shape[0] <= rows:
        return _cross_entropy(hidden_TH, head_weight_VH, labels_T)
    total: torch.Tensor = _ChunkedLoss.apply(hidden_TH, head_weight_VH, labels_T, rows)  # type: ignore[no-untyped-call]
    return total


def _logits(hidden_TH: torch.Tensor, head_weight_VH: torch.Tensor) -> torch.Tensor:
    return linear(hidden_TH, head_weight_VH).to(wide_dtype(hidden_TH.dtype))


def _cross_entropy(hidden_TH: torch.Tensor, head_weight_VH: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_logits(hidden_TH, head_weight_VH), labels_T, ignore_index=IGNORED, reduction="sum")


class _ChunkedLoss(torch.autograd.Function):
    """:func:`_cross_entropy` over chunks of rows, forward and backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_TH: torch.Tensor, head_weight_VH: torch.Tensor, labels_T: torch.Tensor, rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TH, head_weight_VH, labels_T)
        ctx.rows = rows  # type: ignore[attr-defined]
        total = hidden_TH.new_zeros((), dtype=wide_dtype(hidden_TH.dtype))
        for hidden_CH, labels_C in zip(torch.split(hidden_TH, rows), torch.split(labels_T, rows), strict=True):
            total += _cross_entropy(hidden_CH, head_weight_VH, labels_C)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, head_weight_VH, labels_T = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # Summed over many chunks, hence wide.
        grad_head_VH = torch.zeros_like(head_weight_VH, dtype=grad.dtype) if needs_head else None
        for start in range(0, hidden_TH.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            grad_logits_CV = _grad_logits(hidden_TH[part], head_weight_VH, labels_T[part], grad)
            if grad_hidden_TH is not None:
                torch.mm(grad_logits_CV, head_weight_VH, out=grad_hidden_TH[part])
            if grad_head_VH is not None:
                grad_head_VH += grad_logits_CV.T @ hidden_TH[part]
        return grad_hidden_TH, None if grad_head_VH is None else grad_head_VH.to(head_weight_VH.dtype), None, None


def _grad_logits(
    hidden_CH: torch.Tensor, head_weight_VH: torch.Tensor, labels_C: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Return (softmax − one-hot) · grad in the type of the hidden state, zero where the label is ignored."""
    logits_CV = _logits(hidden_CH, head_weight_VH)
    counted_C = labels_C != IGNORED
    probabilities_CV = torch.softmax(logits_CV, dim=-1)
    target_C1 = labels_C.where(counted_C, 0)[:, None]
    probabilities_CV.scatter_add_(1, target_C1, probabilities_CV.new_full(target_C1.shape, -1.0))
    # Scaled before the cast: in float16 the unscaled probabilities of a large vocabulary would vanish.
    return (probabilities_CV * (grad * counted_C)[:, None]).to(hidden_CH.dtype)

"""The head and its loss in one function, so that the logits of a long batch never exist at once."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_kernels.cross_entropy.op import Terms, cross_entropy
from partool_kernels.linear_cross_entropy.op import linear_cross_entropy
from partool_runtime import deferral
from partool_runtime.model.distillation import Teaching, distilled_loss, rows_at_once
from partool_runtime.model.norm import wide_dtype
from partool_runtime.model.scores import scores_in_chunks

IGNORED = -100
"""Label of a position without a loss."""
CHUNK_LOGITS = 2**26
"""Maximum number of logits (rows times vocabulary) held at once; a larger batch is processed in chunks of rows."""


class LossKernels(NamedTuple):
    """Options of partool's loss kernels."""

    mode: str
    """``kernels.mode`` of the spec."""
    early: bool
    """Whether the forward pass already computes the gradients of hidden state and output matrix, and keeps them."""
    vocabulary: int = 0
    """Size of the whole vocabulary. Ranks that shard the vocabulary use it to choose equal chunks of positions."""


Reduction = Literal["sum", "none", "scores"]
"""``sum``: the sum of the losses of all positions, a scalar; ``none``: the loss of each position, ``[B, S]``, 0 where
the label is ignored; ``scores``: the cross entropy of each label and whether it is the model's first choice, ``[2, B,
S]``, without gradients (:mod:`partool_runtime.model.scores`). Kernels and ``z_loss`` are for sums: ``none`` refuses
them, and ``scores``, which judge a model, do without them."""


def loss(
    hidden_BSH: torch.Tensor,
    head_weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    chunk_logits: int = CHUNK_LOGITS,
    *,
    bias_V: torch.Tensor | None = None,
    tile: int = 0,
    z_loss: float = 0.0,
    kernels: LossKernels | None = None,
    reduction: Reduction = "sum",
    teaching: Teaching | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of all labelled positions, a scalar in float32 or wider, or see ``Reduction``.

    A position's loss is its cross entropy plus ``z_loss`` times the squared logarithm of the sum of its logits'
    exponentials (PaLM, arXiv 2204.02311, section 5). The result is a sum and not a mean, so that the caller can divide
    by the tokens of the whole step over all ranks. Above ``chunk_logits`` logits the backward pass recomputes them,
    chunk by chunk: the matrix work grows from 6 to 8 units, but memory does not grow with the batch. Alternatively,
    ``tile`` sets the number of positions whose logits exist at once. With ``kernels.early`` nothing is recomputed.
    With ``teaching`` the gradient is also that of the divergence from a teacher, without kernels
    (:mod:`partool_runtime.model.distillation`).
    """
    if teaching is not None:
        at_once = rows_at_once(tile, chunk_logits, head_weight_VH.shape[0])
        return distilled_loss(
            hidden_BSH, head_weight_VH, labels_BS, teaching, rows=at_once, bias_V=bias_V, z_loss=z_loss
        )
    hidden_TH, labels_T = hidden_BSH.flatten(0, -2), labels_BS.flatten()
    if reduction == "scores":

        def part(rows: slice) -> torch.Tensor:
            return _logits(hidden_TH[rows], head_weight_VH, bias_V)

        return scores_in_chunks(part, labels_BS, tile, head_weight_VH.shape[0])
    if reduction == "none":
        check_plain(kernels, z_loss)
    if kernels is not None and kernels.early and not deferral.is_splitting():
        terms = Terms(z_loss)
        return linear_cross_entropy(
            hidden_TH, head_weight_VH, labels_T, bias=bias_V, terms=terms, rows=tile, mode=kernels.mode
        )
    rows = tile or max(1, chunk_logits // head_weight_VH.shape[0])
    how: _Terms = (z_loss, kernels, reduction)
    if hidden_TH.shape[0] <= rows:
        result = _cross_entropy(hidden_TH, head_weight_VH, bias_V, labels_T, how)
    else:
        chunks = _Chunks(labels_T, rows, how)
        result = _ChunkedLoss.apply(hidden_TH, head_weight_VH, bias_V, chunks)  # type: ignore[no-untyped-call]
    return result if reduction == "sum" else result.view(labels_BS.shape)


def check_plain(kernels: LossKernels | None, z_loss: float) -> None:
    """Raise ValueError for what changes the losses of single positions: they would be no log-probabilities."""
    if kernels is not None or z_loss:
        raise ValueError("losses of single positions are computed without kernels and without z_loss")


_Terms = tuple[float, LossKernels | None, Reduction]
"""Weight ``z_loss``, the options of the kernels that compute the loss, and what is returned of the positions."""


def _logits(
    hidden_TH: torch.Tensor, head_weight_VH: torch.Tensor, bias_V: torch.Tensor | None, *, wide: bool = True
) -> torch.Tensor:
    logits_TV = deferral.linear(hidden_TH, head_weight_VH, bias_V)
    return logits_TV.to(wide_dtype(hidden_TH.dtype)) if wide else logits_TV


def _cross_entropy(
    hidden_TH: torch.Tensor,
    head_weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_T: torch.Tensor,
    terms: _Terms,
) -> torch.Tensor:
    kernels = terms[1]
    return _of_logits(_logits(hidden_TH, head_weight_VH, bias_V, wide=kernels is None), labels_T, terms, in_place=True)


def _of_logits(logits_TV: torch.Tensor, labels_T: torch.Tensor, terms: _Terms, *, in_place: bool) -> torch.Tensor:
    """Return the sum of token losses, or each; kernels write the gradients over the logits if ``in_place``."""
    z_loss, kernels, reduction = terms
    if kernels is not None:
        return cross_entropy(logits_TV, labels_T, Terms(z_loss), kernels.mode, in_place=in_place)
    total = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction=reduction)
    if not z_loss:
        return total
    return total + z_loss * logits_TV.logsumexp(1).square().where(labels_T != IGNORED, 0.0).sum()


def loss_of_logits(
    logits_BSV: torch.Tensor,
    labels_BS: torch.Tensor,
    *,
    tile: int = 0,
    z_loss: float = 0.0,
    kernels: LossKernels | None = None,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Return what :func:`loss` returns, for a model that computes the logits by itself.

    The wide copy of the logits is made for ``tile`` positions at a time (0: of :data:`CHUNK_LOGITS` logits).
    """
    logits_TV, labels_T = logits_BSV.flatten(0, -2), labels_BS.flatten()
    if reduction == "scores":
        return scores_in_chunks(lambda rows: logits_TV[rows], labels_BS, tile, logits_TV.shape[1])
    rows = tile or max(1, CHUNK_LOGITS // logits_TV.shape[1])
    wide = wide_dtype(logits_TV.dtype)
    if reduction == "none":
        check_plain(kernels, z_loss)
    total, each = logits_TV.new_zeros((), dtype=wide), []
    for logits_CV, labels_C in zip(*(torch.split(each, rows) for each in (logits_TV, labels_T)), strict=True):
        given = logits_CV if kernels is not None else logits_CV.to(wide)
        chunk = _of_logits(given, labels_C, (z_loss, kernels, reduction), in_place=False)
        if reduction == "none":
            each.append(chunk)
        else:
            total = total + chunk
    return total if reduction == "sum" else torch.cat(each).view(labels_BS.shape)


class _Chunks(NamedTuple):
    labels: torch.Tensor
    """Labels of all positions, ``[T]``."""
    rows: int
    """Number of positions whose logits exist at once."""
    terms: _Terms


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
        ctx.rows, ctx.terms = chunks.rows, chunks.terms  # type: ignore[attr-defined]
        total, each = hidden_TH.new_zeros((), dtype=wide_dtype(hidden_TH.dtype)), []
        parts = (torch.split(tensor, chunks.rows) for tensor in (hidden_TH, chunks.labels))
        for hidden_CH, labels_C in zip(*parts, strict=True):
            chunk = _cross_entropy(hidden_CH, head_weight_VH, bias_V, labels_C, chunks.terms)
            if chunk.ndim:
                each.append(chunk)
            else:
                total += chunk
        return torch.cat(each) if each else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, head_weight_VH, bias_V, labels_T = ctx.saved_tensors
        needs_hidden, needs_head, needs_bias, _ = ctx.needs_input_grad
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # In a wide type, as it is summed over many chunks.
        grad_head_VH = torch.zeros_like(head_weight_VH, dtype=grad.dtype) if needs_head else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=grad.dtype) if needs_bias else None
        wide = ctx.terms[1] is None
        for start in range(0, hidden_TH.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            # No variable holds the logits, since it would keep two chunks of them alive.
            grad_logits_CV = _grad_logits(
                _logits(hidden_TH[part], head_weight_VH, bias_V, wide=wide),
                labels_T[part],
                grad[part] if grad.ndim else grad,
                ctx.terms,
            ).to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                torch.mm(grad_logits_CV, head_weight_VH, out=grad_hidden_TH[part])
            if grad_head_VH is not None:
                grad_head_VH += grad_logits_CV.T @ hidden_TH[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
        return grad_hidden_TH, _narrow(grad_head_VH, head_weight_VH), _narrow(grad_bias_V, head_weight_VH), None


def _narrow(wide: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if wide is None else wide.to(like.dtype)


def _grad_logits(logits_CV: torch.Tensor, labels_C: torch.Tensor, grad: torch.Tensor, terms: _Terms) -> torch.Tensor:
    """Return ``grad``, one number or one per position, times the logits' gradient, which is 0 for ignored labels.

    Kernels write it over the logits.
    """
    z_loss, kernels, _ = terms
    if kernels is not None:
        operators = torch.ops.partool
        highest_C, sums_C, _ = operators.cross_entropy_parts(logits_CV, labels_C, 0, 0.0, kernels.mode)
        operators.cross_entropy_gradient_(
            logits_CV, labels_C, highest_C + sums_C.log(), grad, first=0, z_loss=z_loss, cap=0.0, kernels=kernels.mode
        )
        return logits_CV
    counted_C = labels_C != IGNORED
    found_CV = torch.softmax(logits_CV, dim=-1)
    if z_loss:
        found_CV *= (1.0 + 2.0 * z_loss * logits_CV.logsumexp(1))[:, None]
    target_C1 = labels_C.where(counted_C, 0)[:, None]
    found_CV.scatter_add_(1, target_C1, found_CV.new_full(target_C1.shape, -1.0))
    # Scaled before any cast: in float16 the unscaled probabilities of a large vocabulary would vanish.
    return found_CV * (grad * counted_C)[:, None]

"""Embedding and head cut by tokens of the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

Each rank has only the logits of its own tokens of the vocabulary. From every other rank the cross entropy needs only
three numbers per position: the largest logit, the sum of exponentials and the logit of the label.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from partool_kernels.cross_entropy.op import Terms, inner_scale, scaled
from partool_kernels.linear_cross_entropy.chunks import How, Inputs, WantedGradients, losses_and_gradients, or_nan
from partool_kernels.registry.chunking import chunk_rows
from partool_runtime import deferral
from partool_runtime.errors import ConfigurationError
from partool_runtime.model.distillation import Teaching
from partool_runtime.model.loss import CHUNK_LOGITS, IGNORED, LossKernels, Reduction, check_plain
from partool_runtime.model.norm import wide_dtype
from partool_runtime.parallel.tensor.distillation import taught_vocabulary_loss
from partool_runtime.parallel.tensor.ops import Team, reduce_from_tp, start_reduce_from_tp, start_tokens, tokens
from partool_runtime.parallel.tensor.scores import vocabulary_scores
from partool_runtime.torch_internals.collectives import finished, start_sum


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """:class:`~partool_runtime.model.embedding.Lookup` in a table of which each rank holds the rows of some tokens."""

    team: Team
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def __call__(self, embed: nn.Embedding, index: torch.Tensor) -> torch.Tensor:
        """Return :func:`vocabulary_rows` of the tokens ``index``, ``[B, S]``; raises ConfigurationError PT648."""
        if self.team.length is not None and index.shape[1] != self.team.length:
            message = f"sequences of {index.shape[1]} tokens, but the plan expects {self.team.length}"
            raise ConfigurationError("PT648", message, "Use sequences of training.sequence_length tokens.")
        return vocabulary_rows(index, embed.weight, self.first, self.team, embed.padding_idx)


@dataclass(frozen=True, slots=True)
class SharedPositions:
    """:class:`~partool_runtime.model.embedding.Lookup` of learned positions, of this rank's share of the tokens."""

    team: Team

    def __call__(self, embed: nn.Embedding, index: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the share of the positions ``[..., S]``, with zeros for padding."""
        share, first = self.team.share, self.team.rank * self.team.share
        rows_XH = F.embedding(index[..., first : first + share], embed.weight)
        return F.pad(rows_XH, (0, 0, 0, share - rows_XH.shape[-2]))


@dataclass(frozen=True, slots=True)
class VocabularyLoss:
    """:class:`~partool_runtime.model.decoder.HeadLoss` over a vocabulary of which each rank holds some tokens."""

    team: Team
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def __call__(
        self, hidden: torch.Tensor, weight_VH: torch.Tensor, labels_BS: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """Return :func:`vocabulary_loss`."""
        return vocabulary_loss(hidden, weight_VH, labels_BS, first=self.first, team=self.team, **how)


def vocabulary_rows(
    tokens_BS: torch.Tensor, weight_VH: torch.Tensor, first: int, team: Team, padding: int | None = None
) -> torch.Tensor:
    """Return the embeddings of tokens; this rank holds the ``V`` rows of the matrix that start at row ``first``.

    The result is the residual stream: all tokens ``[B, S, H]``, or this rank's share of the tokens.
    """
    return reduce_from_tp(looked_up(tokens_BS, weight_VH, first, padding), team)


def looked_up(tokens_BS: torch.Tensor, weight_VH: torch.Tensor, first: int, padding: int | None = None) -> torch.Tensor:
    """Return the embeddings of tokens; zeros for tokens outside of this rank's ``V`` rows, which start at ``first``.

    The row of the token ``padding`` gets no gradient.
    """
    rows, hidden = weight_VH.shape
    if rows == 0:
        # The zeros depend on the weight, so that this rank's graph equals the other ranks' graphs.
        return weight_VH.sum() + weight_VH.new_zeros(*tokens_BS.shape, hidden)
    local_BS = tokens_BS - first
    inside_BS = (local_BS >= 0) & (local_BS < rows)
    here = padding - first if padding is not None and first <= padding < first + rows else None
    return F.embedding(local_BS.where(inside_BS, 0), weight_VH, here) * inside_BS.unsqueeze(-1)


def vocabulary_loss(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    *,
    first: int,
    team: Team,
    bias_V: torch.Tensor | None = None,
    sum_input: bool = True,
    chunk_logits: int = CHUNK_LOGITS,
    z_loss: float = 0.0,
    kernels: LossKernels | None = None,
    reduction: Reduction = "sum",
    teaching: Teaching | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of all labelled positions, the same scalar on every rank, or see ``Reduction``.

    ``hidden`` is the residual stream, all tokens or a share. This rank holds the ``V`` tokens of the vocabulary that
    start at ``first``. As in :func:`partool_runtime.model.loss.loss` the logits of a long batch never exist at once.
    Without ``sum_input`` the gradient of the hidden state is only this rank's term, and the caller sums the terms over
    the ranks. With ``teaching`` the gradient is also that of the divergence from a teacher.
    """
    if teaching is not None:
        return taught_vocabulary_loss(
            hidden, weight_VH, labels_BS, teaching,
            first=first, team=team, chunk_logits=chunk_logits, bias_V=bias_V, z_loss=z_loss,
        )  # fmt: skip
    chunk = team.loss_tile or max(1, chunk_logits // max(1, weight_VH.shape[0]))
    if reduction == "scores":
        return vocabulary_scores(hidden, weight_VH, labels_BS, bias_V, first=first, team=team, chunk=chunk)
    graph, splits = torch.is_grad_enabled(), deferral.is_splitting()
    if reduction == "none":
        check_plain(kernels, z_loss)
    how = _How(team, labels_BS, first, chunk, sum_input, splits, z_loss, kernels, graph, reduction)
    if kernels is not None and kernels.early and not how.splits:
        early: torch.Tensor = _EarlyLoss.apply(hidden, weight_VH, bias_V, how)  # type: ignore[no-untyped-call]
        return early
    result: torch.Tensor = _VocabularyLoss.apply(hidden, weight_VH, bias_V, how)  # type: ignore[no-untyped-call]
    return result if reduction == "sum" else result.view(labels_BS.shape)


class _How(NamedTuple):
    team: Team
    labels: torch.Tensor
    """Labels ``[B, S]``."""
    first: int
    """Index of the first vocabulary token that this rank holds."""
    chunk: int
    """Number of positions whose logits exist at once."""
    sum_input: bool
    splits: bool
    """Whether the gradients of weight and bias may be deferred."""
    z_loss: float = 0.0
    kernels: LossKernels | None = None
    graph: bool = True
    """Whether gradients will be computed."""
    reduction: Reduction = "sum"


class _VocabularyLoss(torch.autograd.Function):
    """Head and cross entropy over ranks; with more than ``chunk`` positions the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, how: _How
    ) -> torch.Tensor:
        full_BSH = hidden if how.team.length is None else tokens(start_tokens(hidden, how.team), how.team)
        hidden_TH, labels_T = full_BSH.flatten(0, 1), how.labels.flatten()
        seen = []
        for start in range(0, len(labels_T), how.chunk):
            part = slice(start, start + how.chunk)
            logits_CV = _logits(hidden_TH[part], weight_VH, bias_V, how)
            seen.append(_seen(logits_CV, labels_T[part], how))
        log_total_T, target_T = _of_all_ranks(_Seen(*map(torch.cat, zip(*seen, strict=True))), how.team)
        log_total_T = or_nan(log_total_T, labels_T, how.kernels.vocabulary if how.kernels else 0)
        kept = logits_CV if len(seen) == 1 else None
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, log_total_T, kept)  # type: ignore[arg-type]
        # References to the parameters themselves: deferred gradients are added to these, not to unpacked copies.
        ctx.weight, ctx.bias, ctx.how = weight_VH, bias_V, how  # type: ignore[attr-defined]
        return _summed(log_total_T, target_T, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_VH, _, log_total_T, logits_TV = ctx.saved_tensors
        how: _How = ctx.how
        shape = (*how.labels.shape, weight_VH.shape[1])
        if logits_TV is None:
            grad_hidden_TH, *sums = _in_chunks(ctx, grad)
            grad_hidden = grad_hidden_TH.view(shape)
            if how.sum_input:
                grad_hidden = finished(start_reduce_from_tp(grad_hidden, how.team, fresh=True))
            return grad_hidden, *sums, None
        grad_TV = _grad_logits(logits_TV, log_total_T, how.labels.flatten(), how, grad).to(hidden_TH.dtype)
        grad_hidden = (grad_TV @ weight_VH).view(shape)
        if not how.sum_input:
            return grad_hidden, *_of_parameters(ctx, hidden_TH, grad_TV), None
        travelling = start_reduce_from_tp(grad_hidden, how.team, fresh=True)
        if not how.team.overlap:
            travelling = finished(travelling)
        of_parameters = _of_parameters(ctx, hidden_TH, grad_TV)
        return finished(travelling), *of_parameters, None


class _Seen(NamedTuple):
    """Maximum logit, sum of exponentials and label's logit per position, over one rank's part of the vocabulary."""

    highest: torch.Tensor
    """Largest logit."""
    sums: torch.Tensor
    """Sum of the exponentials of the logits, after the largest logit is subtracted from each."""
    target: torch.Tensor
    """The label's logit; 0 where another rank holds the label."""


class _EarlyLoss(torch.autograd.Function):
    """Head and cross entropy over ranks; the forward pass computes the gradients, the backward pass scales them.

    The ranks exchange their maxima and sums of one chunk of positions before they compute the next chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, how: _How
    ) -> torch.Tensor:
        full_BSH = hidden if how.team.length is None else tokens(start_tokens(hidden, how.team), how.team)
        hidden_TH, labels_T = full_BSH.flatten(0, 1), how.labels.flatten()
        needs = WantedGradients(*(how.graph and needed for needed in ctx.needs_input_grad[:3]))
        loss_and_gradients = losses_and_gradients(
            Inputs(hidden_TH, weight_VH, bias_V, labels_T),
            How(
                Terms(how.z_loss),
                _rows(hidden_TH, how),
                _mode(how),
                how.first,
                partial(_merged, team=how.team),
                vocabulary=how.kernels.vocabulary if how.kernels else 0,
            ),
            needs,
        )
        ctx.save_for_backward(loss_and_gradients.hidden, loss_and_gradients.weight, loss_and_gradients.bias)
        ctx.how, ctx.shape, ctx.dtype = how, full_BSH.shape, hidden.dtype
        ctx.inner = inner_scale(hidden.dtype, len(weight_VH))
        return loss_and_gradients.total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        team, factor = ctx.how.team, grad / ctx.inner
        of_hidden, *sums = ctx.saved_tensors
        grad_hidden = None if of_hidden is None else _times(of_hidden, factor, ctx).view(ctx.shape)
        if grad_hidden is None or not ctx.how.sum_input:
            return grad_hidden, *(_times(x, factor, ctx) for x in sums), None
        travelling = start_reduce_from_tp(grad_hidden, team, fresh=True)
        if not team.overlap:
            travelling = finished(travelling)
        of_parameters = [_times(x, factor, ctx) for x in sums]
        return finished(travelling), *of_parameters, None


def _times(x: torch.Tensor | None, factor: torch.Tensor, ctx: Any) -> Any:
    return None if x is None else scaled(x, factor, ctx.dtype, _mode(ctx.how))


def _rows(hidden_TH: torch.Tensor, how: _How) -> int:
    """Return the number of positions in a chunk, which all ranks share even if their parts of the vocabulary differ."""
    assert how.kernels is not None
    most = -(-how.kernels.vocabulary // how.team.ranks)
    return how.team.loss_tile or chunk_rows(len(hidden_TH), most, hidden_TH.itemsize)


def _mode(how: _How) -> str:
    assert how.kernels is not None
    return how.kernels.mode


def _merged(parts_3C: torch.Tensor, team: Team) -> tuple[torch.Tensor, torch.Tensor]:
    return _of_all_ranks(_Seen(*parts_3C.unbind()), team)


def _summed(log_total_T: torch.Tensor, target_T: torch.Tensor, how: _How) -> torch.Tensor:
    losses_T = log_total_T - target_T
    if how.z_loss:
        losses_T += how.z_loss * log_total_T.square()
    losses_T = losses_T.where(how.labels.flatten() != IGNORED, 0.0)
    return losses_T.sum() if how.reduction == "sum" else losses_T


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, how: _How) -> torch.Tensor:
    logits_CV = F.linear(hidden_CH, weight_VH, bias_V)
    return logits_CV.to(wide_dtype(hidden_CH.dtype)) if how.kernels is None else logits_CV


def _seen(logits_CV: torch.Tensor, labels_C: torch.Tensor, how: _How) -> _Seen:
    """Return the largest logit, the sum of exponentials and the label's logit of each position on this rank."""
    if how.kernels is not None:
        return _Seen(*torch.ops.partool.cross_entropy_parts(logits_CV, labels_C, how.first, 0.0, how.kernels.mode))
    local_C = labels_C - how.first
    if logits_CV.shape[1] == 0:
        nothing_C = logits_CV.new_zeros(len(logits_CV))
        return _Seen(torch.full_like(nothing_C, -torch.inf), nothing_C, nothing_C)
    highest_C = logits_CV.amax(1)
    inside_C = (local_C >= 0) & (local_C < logits_CV.shape[1])
    target_C = logits_CV.gather(1, local_C.where(inside_C, 0)[:, None])[:, 0].where(inside_C, 0.0)
    return _Seen(highest_C, (logits_CV - highest_C[:, None]).exp().sum(1), target_C)


def _of_all_ranks(seen: _Seen, team: Team) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the sum of all exponentials, and the label's logit, per position."""
    highest_T = finished(start_sum(seen.highest, team.group_name, in_place=False, kind="max"))
    packed_2T = torch.stack([seen.sums * (seen.highest - highest_T).exp(), seen.target])
    sums_T, target_T = finished(start_sum(packed_2T, team.group_name, in_place=True))
    return sums_T.log() + highest_T, target_T


def _grad_logits(
    logits_CV: torch.Tensor, log_total_C: torch.Tensor, labels_C: torch.Tensor, how: _How, grad: torch.Tensor
) -> torch.Tensor:
    """Return ``grad``, one number or one per position, times the loss's gradient for this rank's logits.

    It is zero where the label is ignored.

    Device kernels overwrite the logits with this gradient.
    """
    if how.kernels is not None:
        torch.ops.partool.cross_entropy_gradient_(
            logits_CV, labels_C, log_total_C, grad,
            first=how.first, z_loss=how.z_loss, cap=0.0, kernels=how.kernels.mode,
        )  # fmt: skip
        return logits_CV
    grads_CV = (logits_CV - log_total_C[:, None]).exp()
    if how.z_loss:
        grads_CV *= (1.0 + 2.0 * how.z_loss * log_total_C)[:, None]
    local_C = labels_C - how.first
    inside_C = (local_C >= 0) & (local_C < logits_CV.shape[1])
    if logits_CV.shape[1]:
        grads_CV.scatter_add_(1, local_C.where(inside_C, 0)[:, None], -inside_C[:, None].to(grads_CV.dtype))
    # Scaled before any cast: in float16 the unscaled probabilities of a large vocabulary would vanish.
    return grads_CV * (grad * (labels_C != IGNORED))[:, None]


def _in_chunks(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of hidden states, weight and bias; only one chunk's logits exist at a time."""
    hidden_TH, weight_VH, bias_V, log_total_T, _ = ctx.saved_tensors
    how: _How = ctx.how
    labels_T, grad_hidden_TH = how.labels.flatten(), torch.empty_like(hidden_TH)
    # Sums over many chunks need a wide type.
    of_weight = torch.zeros_like(weight_VH, dtype=grad.dtype) if ctx.needs_input_grad[1] else None
    of_bias = torch.zeros_like(bias_V, dtype=grad.dtype) if ctx.needs_input_grad[2] else None
    for start in range(0, len(labels_T), how.chunk):
        part = slice(start, start + how.chunk)
        logits_CV = _logits(hidden_TH[part], weight_VH, bias_V, how)
        grad_C = grad[part] if grad.ndim else grad
        grad_CV = _grad_logits(logits_CV, log_total_T[part], labels_T[part], how, grad_C).to(hidden_TH.dtype)
        torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
        if of_weight is not None:
            of_weight += grad_CV.T @ hidden_TH[part]
        if of_bias is not None:
            of_bias += grad_CV.sum(0)
    return grad_hidden_TH, _narrow(of_weight, weight_VH), _narrow(of_bias, weight_VH)


def _narrow(wide: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if wide is None else wide.to(like.dtype)


def _of_parameters(
    ctx: Any, hidden_TH: torch.Tensor, grad_TV: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias; None where they are deferred."""
    _, needs_weight, needs_bias, _ = ctx.needs_input_grad
    if ctx.how.splits and needs_weight and ctx.weight.is_leaf:
        later = partial(deferral.add_gradients, ctx.weight, ctx.bias if needs_bias else None, hidden_TH, grad_TV)
        if deferral.defer(later):
            return None, None
    of_weight = deferral.of_weight(hidden_TH, grad_TV) if needs_weight else None
    return of_weight, deferral.of_bias(grad_TV) if needs_bias else None

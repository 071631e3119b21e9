"""Cross entropy with a divergence from a teacher's predictions, so that the logits of a long batch never exist at once.

The divergence of a position is β · T² · KL(teacher ‖ student), both softmaxes at temperature T (Hinton et al., arXiv
1503.02531, section 2; DeepSpeed-MoE, arXiv 2201.05596, section 4.2.1). The forward pass already computes the gradients
of hidden state and output matrix, as the teacher's output matrix may be gone in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from partool_kernels.cross_entropy.op import inner_scale
from partool_runtime.model.norm import wide_dtype

_IGNORED = -100
_WIDE_COPIES = 8
"""Arrays of the logits' size that a chunk holds at its fullest, at most; a plain cross entropy holds two or three."""


class Vocabulary(Protocol):
    """The ranks that share the vocabulary, as the sums over it need them."""

    @property
    def first(self) -> int:
        """Index of this rank's first token."""

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over the ranks."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks."""


@dataclass(frozen=True, slots=True)
class FullVocabulary:
    """A vocabulary that one rank holds."""

    first: int = 0

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Vocabulary`."""
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Vocabulary`."""
        return x


@dataclass(slots=True)
class Teaching:
    """What the loss of a micro-batch needs of its teacher, and the divergence that the loss has computed."""

    weight: float
    """β."""
    temperature: float
    """T, of both softmaxes."""
    vocabulary: int
    """Number of tokens of the whole vocabulary."""
    hidden: torch.Tensor
    """The teacher's normalised hidden state after its last layer, of the same tokens as the student's."""
    head_weight: torch.Tensor
    """The teacher's output matrix, of the same tokens of the vocabulary as the student's."""
    bias: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    """Sum over the labelled positions of KL(teacher ‖ student), without β · T²; the loss sets it."""


def rows_at_once(tile: int, chunk_logits: int, vocabulary: int) -> int:
    """Return the number of positions in a chunk: ``tile``, or 0 for as many as ``chunk_logits`` leave room for.

    ``vocabulary`` is the number of tokens of the vocabulary that a rank holds.
    """
    return tile or max(1, 2 * chunk_logits // (_WIDE_COPIES * max(1, vocabulary)))


class _Asked(NamedTuple):
    """Options of a loss."""

    teaching: Teaching
    labels: torch.Tensor
    """Labels of all positions, ``[T]``."""
    rows: int
    """Number of positions whose logits exist at once."""
    z_loss: float
    vocabulary: Vocabulary


def distilled_loss(
    hidden: torch.Tensor,
    head_weight_VH: torch.Tensor,
    labels_BS: torch.Tensor,
    teaching: Teaching,
    *,
    rows: int,
    bias_V: torch.Tensor | None = None,
    z_loss: float = 0.0,
    vocabulary: Vocabulary | None = None,
) -> torch.Tensor:
    """Return the sum of the losses of all labelled positions, with the gradient of the sum plus the divergence.

    ``hidden`` is the student's ``[B, S, H]``, of all tokens. The value is that of ``partool_runtime.model.loss.loss``,
    so that it can be compared with validations and with students without a teacher; ``teaching.kl`` gets the
    divergence. The scalar is in float32 or wider, and the same on ranks that share the vocabulary. ``rows`` positions
    have logits at once, of teacher and student. A rank's gradient of ``hidden`` is that of its tokens of the
    vocabulary.
    """
    asked = _Asked(teaching, labels_BS.flatten(), rows, z_loss, vocabulary or FullVocabulary())
    result: torch.Tensor = _DistilledLoss.apply(hidden.flatten(0, -2), head_weight_VH, bias_V, asked)  # type: ignore[no-untyped-call]
    return result


class _DistilledLoss(torch.autograd.Function):
    """Both losses chunk by chunk; the forward pass computes the gradients, the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, asked: _Asked
    ) -> torch.Tensor:
        wide, teaching = wide_dtype(hidden_TH.dtype), asked.teaching
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        of_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if needs_weight else None
        of_bias_V = torch.zeros_like(bias_V, dtype=wide) if needs_bias and bias_V is not None else None
        total, kl = hidden_TH.new_zeros((), dtype=wide), hidden_TH.new_zeros((), dtype=wide)
        taught_TH = teaching.hidden.flatten(0, -2)
        ctx.inner = inner_scale(hidden_TH.dtype, teaching.vocabulary)
        for start in range(0, len(asked.labels), asked.rows):
            part = slice(start, start + asked.rows)
            chunk = _chunk(  # no variable keeps the logits, which are replaced
                F.linear(hidden_TH[part], weight_VH, bias_V).to(wide),
                F.linear(taught_TH[part], teaching.head_weight, teaching.bias).to(wide),
                asked.labels[part],
                asked,
            )
            total, kl = total + chunk.loss, kl + chunk.kl
            # Scaled before the cast: in float16 the probabilities of a large vocabulary would vanish.
            grad_CV = (chunk.grad * ctx.inner).to(hidden_TH.dtype)
            if of_hidden_TH is not None:
                torch.mm(grad_CV, weight_VH, out=of_hidden_TH[part])
            if of_weight_VH is not None:
                of_weight_VH += grad_CV.T @ hidden_TH[part]
            if of_bias_V is not None:
                of_bias_V += grad_CV.sum(0)
        teaching.kl = kl
        ctx.dtype = hidden_TH.dtype
        ctx.save_for_backward(of_hidden_TH, of_weight_VH, of_bias_V)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = grad / ctx.inner
        return *(None if each is None else (each * factor).to(ctx.dtype) for each in ctx.saved_tensors), None


class _Chunk(NamedTuple):
    """What a chunk of positions adds."""

    loss: torch.Tensor
    kl: torch.Tensor
    grad: torch.Tensor
    """Gradient of this rank's logits of the student, 0 where the label is ignored."""


def _chunk(student_CV: torch.Tensor, teacher_CV: torch.Tensor, labels_C: torch.Tensor, asked: _Asked) -> _Chunk:
    """Return losses and gradients of a chunk, from this rank's logits in a wide type."""
    vocabulary, temperature = asked.vocabulary, asked.teaching.temperature
    counted_C = labels_C != _IGNORED
    local_C = labels_C - vocabulary.first
    inside_C = (local_C >= 0) & (local_C < student_CV.shape[1])
    at_C1 = local_C.where(inside_C, 0)[:, None]
    highest_2C = vocabulary.maximum(torch.stack([_highest(student_CV), _highest(teacher_CV)]))
    student_CV, teacher_CV = student_CV - highest_2C[0][:, None], teacher_CV - highest_2C[1][:, None]
    plain_CV, taught_CV = student_CV.exp(), (teacher_CV / temperature).exp()
    soft_CV = plain_CV if temperature == 1.0 else (student_CV / temperature).exp()
    empty = student_CV.shape[1] == 0
    target_C = highest_2C.new_zeros(len(labels_C)) if empty else student_CV.gather(1, at_C1)[:, 0].where(inside_C, 0.0)
    apart_C = (taught_CV * (teacher_CV - student_CV)).sum(1) / temperature
    sums = torch.stack([plain_CV.sum(1), soft_CV.sum(1), taught_CV.sum(1), target_C, apart_C])
    plain_C, soft_C, taught_C, target_C, apart_C = vocabulary.total(sums)
    log_total_C = plain_C.log() + highest_2C[0]
    losses_C = plain_C.log() - target_C + asked.z_loss * log_total_C.square()
    kl_C = apart_C / taught_C - taught_C.log() + soft_C.log()
    grad_CV = plain_CV * ((1.0 + 2.0 * asked.z_loss * log_total_C) / plain_C)[:, None]
    grad_CV += asked.teaching.weight * temperature * (soft_CV / soft_C[:, None] - taught_CV / taught_C[:, None])
    if not empty:
        grad_CV.scatter_add_(1, at_C1, -inside_C[:, None].to(grad_CV.dtype))
    loss, kl = (each.where(counted_C, 0.0).sum() for each in (losses_C, kl_C))
    return _Chunk(loss, kl, grad_CV * counted_C[:, None])


def _highest(logits_CV: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each position; −∞ on a rank without tokens of the vocabulary."""
    return logits_CV.amax(1) if logits_CV.shape[1] else logits_CV.new_full((len(logits_CV),), -torch.inf)

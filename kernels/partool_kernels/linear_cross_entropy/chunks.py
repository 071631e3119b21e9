"""Compute losses and gradients chunk by chunk.

Each chunk takes one product for its logits and two products for the gradients of hidden states and weight; the
gradient of the logits overwrites the logits. As gradients are computed with the loss, nothing is computed twice. The
total is 6 · rows · V · H multiplications and additions, as without chunks (Liger Kernel, Hsu et al., arXiv 2410.10989,
section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from partool_kernels.cross_entropy.op import IGNORED, Terms, inner_scale
from partool_kernels.registry.chunking import WIDE_ABOVE, chunk_rows


def add_product(total: torch.Tensor, grads_CV: torch.Tensor, inputs_CH: torch.Tensor) -> None:
    """Add ``grads_CVᵀ · inputs_CH`` to ``total [V, H]``, whose type may be float32."""
    if total.dtype == grads_CV.dtype:
        torch.addmm(total, grads_CV.T, inputs_CH, out=total)
    elif _adds_wide(grads_CV.device, grads_CV.dtype):
        torch.ops.aten.addmm.dtype_out(total, grads_CV.T, inputs_CH, total.dtype, out=total)
    elif grads_CV.dtype == torch.float16:
        # One product in float16 may overflow although the total would not.
        total += grads_CV.T.to(total.dtype) @ inputs_CH.to(total.dtype)
    else:
        total += grads_CV.T @ inputs_CH


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this build of torch can add products of ``dtype`` matrices to a float32 total on the device."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    total = torch.zeros(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((total == 16.0).all())


Merge = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function that merges the results of all vocabulary shards. It takes ``[3, C]`` of this rank's shard: largest logit,
sum of ``exp(logit - largest)``, and the label's logit or 0. It returns two tensors ``[C]`` for the whole vocabulary:
the logarithm of the sum of exponentials, and the label's logit."""


class How(NamedTuple):
    """The definition of the loss, and the division into chunks and vocabulary shards."""

    terms: Terms = Terms()
    rows: int = 0
    """Number of rows whose logits exist at once; 0 takes the number that :func:`chunk_rows` returns."""
    mode: str = "auto"
    first: int = 0
    """First token of this rank's vocabulary shard."""
    merge: Merge | None = None
    """Set if the vocabulary is sharded over ranks; all ranks call the function for the chunks in order."""
    vocabulary: int = 0
    """Number of tokens in all shards of the vocabulary; 0 if unknown. Labels not below this number give a NaN loss and
    gradient."""


class WantedGradients(NamedTuple):
    """Flags that are true for the gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool


class Inputs(NamedTuple):
    """Input tensors of one pass."""

    hidden: torch.Tensor
    """``[T, H]``."""
    weight: torch.Tensor
    """``[V, H]``."""
    bias: torch.Tensor | None
    """``[V]``."""
    labels: torch.Tensor
    """``[T]``."""


class LossAndGradients(NamedTuple):
    """The sum of the losses, and its gradients multiplied with :func:`inner_scale`."""

    total: torch.Tensor
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    """Gradient of the weight, in the type that :func:`sum_types` returns."""
    bias: torch.Tensor | None
    """Gradient of the bias, in float64 for float64 inputs, otherwise in float32."""


def losses_and_gradients(inputs: Inputs, how: How, needs: WantedGradients) -> LossAndGradients:
    """Return the sum of the losses of all rows and its gradients; only one chunk's logits exist at a time."""
    hidden_TH, weight_VH, bias_V, labels_T = inputs
    (tokens, _), vocabulary = hidden_TH.shape, len(weight_VH)
    rows = _rows(inputs, how.rows)
    of_sum, wide = sum_types(inputs, rows)
    total = hidden_TH.new_zeros((), dtype=wide)
    of_hidden = torch.empty_like(hidden_TH, memory_format=torch.contiguous_format) if needs.hidden else None
    of_weight = torch.zeros_like(weight_VH, dtype=of_sum) if needs.weight else None
    of_bias = torch.zeros_like(bias_V, dtype=wide) if needs.bias and bias_V is not None else None
    buffer_CV = logits_buffer(min(rows, tokens), vocabulary, hidden_TH)
    for start in range(0, tokens, rows):
        part = slice(start, min(start + rows, tokens))
        chunk = Inputs(hidden_TH[part], weight_VH, bias_V, labels_T[part])
        logits_CV = buffer_CV[: part.stop - start]
        write_logits(logits_CV, chunk)
        total += _loss_of(logits_CV, chunk.labels, how, gradient=any(needs))
        if of_hidden is not None:
            torch.mm(logits_CV, weight_VH, out=of_hidden[part])
        if of_weight is not None:
            add_product(of_weight, logits_CV, chunk.hidden)
        if of_bias is not None:
            of_bias += logits_CV.sum(0, dtype=wide)
    return LossAndGradients(total, of_hidden, of_weight, of_bias)


def _rows(inputs: Inputs, rows: int) -> int:
    return rows or chunk_rows(len(inputs.hidden), len(inputs.weight), inputs.hidden.itemsize)


def sum_types(inputs: Inputs, rows: int) -> tuple[torch.dtype, torch.dtype]:
    """Return two types: one for sums of the weight's gradients, one for sums of losses and of the bias's gradients."""
    dtype, tokens = inputs.hidden.dtype, len(inputs.hidden)
    many = dtype.itemsize == 2 and tokens > WIDE_ABOVE * _rows(inputs, rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return wide if many or dtype == torch.float16 else dtype, wide


def logits_buffer(rows: int, vocabulary: int, like: torch.Tensor) -> torch.Tensor:
    """Return memory for logits; rows begin at multiples of 128 bytes, so rows of any length are read equally fast."""
    step = 128 // like.itemsize
    padded = max(1, -(-vocabulary // step)) * step
    return torch.empty(rows, padded, dtype=like.dtype, device=like.device)[:, :vocabulary]


def write_logits(logits_CV: torch.Tensor, chunk: Inputs) -> None:
    """Write the logits of a chunk to ``logits_CV``."""
    if chunk.bias is None:
        torch.mm(chunk.hidden, chunk.weight.T, out=logits_CV)
    else:
        torch.addmm(chunk.bias, chunk.hidden, chunk.weight.T, out=logits_CV)


def or_nan(log_totals_C: torch.Tensor, labels_C: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return ``log_totals_C`` with NaN where the label is outside the vocabulary of size ``vocabulary``.

    With ``vocabulary`` 0 the size is unknown. One shard does not suffice to find such labels: valid labels of other
    shards also have the logit 0 in this shard.
    """
    wrong_C = (labels_C < 0) & (labels_C != IGNORED)
    if vocabulary:
        wrong_C |= labels_C >= vocabulary
    return log_totals_C.masked_fill(wrong_C, torch.nan)


def _loss_of(logits_CV: torch.Tensor, labels_C: torch.Tensor, how: How, *, gradient: bool) -> torch.Tensor:
    """Return the sum of a chunk's losses; with ``gradient`` overwrite the chunk's logits with their gradient."""
    operators, (z_loss, cap) = torch.ops.partool, how.terms
    scale = inner_scale(logits_CV.dtype, logits_CV.shape[1])
    if how.merge is None and gradient:
        losses_C: torch.Tensor = operators.cross_entropy_(
            logits_CV, labels_C, z_loss=z_loss, cap=cap, scale=scale, kernels=how.mode
        )
        return losses_C.sum()
    if how.merge is None:
        total: torch.Tensor = operators.cross_entropy(
            logits_CV, labels_C, z_loss=z_loss, cap=cap, gradient=False, kernels=how.mode
        )[0]
        return total
    parts_3C = operators.cross_entropy_parts(logits_CV, labels_C, how.first, cap, how.mode)
    log_totals_C, targets_C = how.merge(parts_3C)
    log_totals_C = or_nan(log_totals_C, labels_C, how.vocabulary)
    if gradient:
        operators.cross_entropy_gradient_(
            logits_CV, labels_C, log_totals_C, log_totals_C.new_full((), scale),
            first=how.first, z_loss=z_loss, cap=cap, kernels=how.mode,
        )  # fmt: skip
    losses_C = log_totals_C - targets_C + z_loss * log_totals_C.square()
    return losses_C.where(labels_C != IGNORED, 0.0).sum()

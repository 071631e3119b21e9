"""Cross entropy by torch's operators, which checks the Triton kernels and replaces them where they cannot run."""

from __future__ import annotations

import torch

IGNORED = -100
"""Label of a row that has no loss."""


def losses_of(
    logits: torch.Tensor, labels: torch.Tensor, z_loss: float = 0.0, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss, and the logarithm of the row's sum of exponentials; logits are ``[rows, V]``.

    The results are float64 for float64 logits, otherwise float32. A label that is neither a column nor
    :data:`IGNORED` raises ValueError on the CPU; on other devices it makes the row's loss NaN.
    """
    counted = labels != IGNORED
    inside = (labels >= 0) & (labels < logits.shape[1])
    if logits.device.type == "cpu" and not bool((inside | ~counted).all()):
        wrong = labels[~inside & counted]
        raise ValueError(f"label {int(wrong[0])} is none of {logits.shape[1]} tokens")
    wide = _bent(logits, cap)
    if not wide.shape[1]:
        zeros = wide.new_zeros(len(wide))
        return zeros, zeros
    log_totals = wide.logsumexp(1).where(inside, torch.nan)
    targets = wide.gather(1, labels.where(inside, 0)[:, None])[:, 0]
    return (log_totals - targets + z_loss * log_totals.square()).where(counted, 0.0), log_totals


def parts_of(logits: torch.Tensor, labels: torch.Tensor, first: int, cap: float = 0.0) -> torch.Tensor:
    """Return the largest logit, the sum of ``exp(logit - largest)`` and the label's logit of each row, ``[3, rows]``.

    The columns are the vocabulary's tokens from ``first`` on. Where no column is the label, the returned logit of the
    label is 0.
    """
    wide = _bent(logits, cap)
    if not wide.shape[1]:
        nothing = wide.new_zeros(len(wide))
        return torch.stack([torch.full_like(nothing, -torch.inf), nothing, nothing])
    columns = labels - first
    inside = (columns >= 0) & (columns < wide.shape[1])
    highest = wide.amax(1)
    sums = (wide - highest.where(highest != -torch.inf, 0.0)[:, None]).exp().sum(1)
    targets = wide.gather(1, columns.where(inside, 0)[:, None])[:, 0].where(inside, 0.0)
    return torch.stack([highest, sums, targets])


def write_gradient(
    out: torch.Tensor,
    logits: torch.Tensor,
    columns: torch.Tensor,
    log_totals: torch.Tensor,
    scale: torch.Tensor,
    *,
    terms: tuple[float, float] = (0.0, 0.0),
    ignored: torch.Tensor | None = None,
) -> None:
    """Write the gradient of the sum of the losses, times ``scale``, to ``out``, which may be the logits.

    ``columns`` holds labels counted from the first column; ``terms`` are z_loss and cap; ``ignored`` marks the rows
    without a loss, by default the rows whose entry in ``columns`` is :data:`IGNORED`.
    """
    z_loss, cap = terms
    wide = _bent(logits, cap)
    if not wide.shape[1]:
        return
    inside = (columns >= 0) & (columns < wide.shape[1])
    grads = (wide - log_totals[:, None]).exp() * (1.0 + 2.0 * z_loss * log_totals)[:, None]
    grads.scatter_add_(1, columns.where(inside, 0)[:, None], -inside[:, None].to(grads.dtype))
    if cap > 0:
        grads *= 1.0 - (wide / cap).square()
    # Scale before casting: in float16 the unscaled probabilities of a large vocabulary would become 0.
    grads *= scale
    out.copy_(grads.masked_fill_((columns == IGNORED if ignored is None else ignored)[:, None], 0.0))


def _bent(logits: torch.Tensor, cap: float) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cap * torch.tanh(wide / cap) if cap > 0 else wide

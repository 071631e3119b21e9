"""Torch versions of the passes of :mod:`partool_kernels.host.update`, used where there is no compiled library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partool_kernels.host.types import Part, StepRule, Sums, UpdatePass
from partool_kernels.reductions import block_sums

if TYPE_CHECKING:
    import torch


def update(
    parts: Sequence[Part],
    commit: UpdatePass | None,
    step: UpdatePass | None,
    *,
    keep: bool,
    weights: Sequence[torch.Tensor] | None,
    wants_sums: bool,
) -> Sums | None:
    """See :func:`partool_kernels.host.update`; results equal torch's bit for bit, even if a step is committed later."""
    gradient_sums = sums(step.gradients) if wants_sums and step is not None else None
    for index, part in enumerate(parts):
        if commit is not None:
            _apply(part.master, part.moments, commit.gradients[index], commit.rules[part.group])
        master = part.master
        if step is not None:
            moments = part.moments
            if not keep:
                master, moments = master.clone(), tuple(moment.clone() for moment in moments)
            _apply(master, moments, step.gradients[index], step.rules[part.group])
        if weights is not None:
            weights[index].copy_(master)
    return gradient_sums


def sums(gradients: Sequence[torch.Tensor]) -> Sums:
    """See :func:`partool_kernels.host.sums`."""
    by_gradient = [block_sums(gradient, "torch") for gradient in gradients]
    return Sums(tuple(squares for squares, _ in by_gradient), tuple(finite for _, finite in by_gradient))


def accumulate(into: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, first: bool) -> None:
    """See :func:`partool_kernels.host.accumulate`."""
    for total, gradient in zip(into, gradients, strict=True):
        total.copy_(gradient) if first else total.add_(gradient)


def _apply(master: torch.Tensor, moments: Sequence[torch.Tensor], gradient: torch.Tensor, rule: StepRule) -> None:
    """Update a master and its moments in place; moments kept in bfloat16 are rounded once, at the end."""
    if rule.kind == "adamw" and all(moment.dtype == master.dtype for moment in moments):
        _fused_adamw(master, moments, gradient, rule)
        return
    wide = [moment.to(master.dtype) for moment in moments]
    g = gradient.to(master.dtype) * rule.scale
    master.mul_(1.0 - rule.lr * rule.weight_decay)
    if rule.kind == "adamw":
        first, second = wide
        first.mul_(rule.beta1).add_(g, alpha=1.0 - rule.beta1)
        second.mul_(rule.beta2).addcmul_(g, g, value=1.0 - rule.beta2)
        root = (second / (1.0 - rule.beta2**rule.step)).sqrt_().add_(rule.eps)
        master.addcdiv_(first, root, value=-rule.lr / (1.0 - rule.beta1**rule.step))
    elif rule.kind == "lion":
        master.add_((wide[0] * rule.beta1).add_(g, alpha=1.0 - rule.beta1).sign_(), alpha=-rule.lr)
        wide[0].mul_(rule.beta2).add_(g, alpha=1.0 - rule.beta2)
    elif rule.kind == "adagrad":
        wide[0].addcmul_(g, g)
        master.addcdiv_(g, wide[0].sqrt().add_(rule.eps), value=-rule.lr)
    else:
        wide[0].mul_(rule.beta1).add_(g)
        master.add_(wide[0], alpha=-rule.lr)
    for moment, value in zip(moments, wide, strict=True):
        if moment is not value:
            moment.copy_(value)


def _fused_adamw(master: torch.Tensor, moments: Sequence[torch.Tensor], gradient: torch.Tensor, rule: StepRule) -> None:
    """Update the master and its moments by torch's fused AdamW.

    Results have equal bits for any number of threads, and also if a tensor is cut at multiples of 64 bytes. Other cuts
    change the bits, as the fused code rounds the last elements of a tensor differently.
    """
    import torch
    from torch.optim.adamw import adamw

    if master.numel() == 0:
        return
    wide = gradient.to(master.dtype)
    adamw(
        [master],
        [wide * rule.scale if rule.scale != 1.0 else wide],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(float(rule.step - 1))],
        fused=True,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=False,
    )

"""The sum of the cross entropies of ``hidden @ weight.T`` as one operator that computes gradients with the loss."""

from __future__ import annotations

from typing import Any

import torch

from partool_kernels.cross_entropy.op import PLAIN, Terms, inner_scale, scaled
from partool_kernels.cross_entropy.op import check as check_logits
from partool_kernels.linear_cross_entropy.chunks import How, Inputs, WantedGradients, losses_and_gradients, sum_types


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    terms: Terms = PLAIN,
    rows: int = 0,
    mode: str = "auto",
) -> torch.Tensor:
    """Return the sum of the losses of logits ``hidden @ weight.T``, a scalar in float32 or float64.

    ``hidden`` is ``[..., H]``, ``weight`` is ``[V, H]``, and ``labels [...]`` are int64; rows whose label is −100 do
    not count. Logits of ``rows`` rows exist at once; the default is the number that
    :func:`partool_kernels.registry.chunking.chunk_rows` returns. The gradients are computed with the loss and scaled in
    the backward pass. ``terms`` and ``mode`` are as in :func:`partool_kernels.cross_entropy.op.cross_entropy`. Raises
    ValueError where shapes, types or devices do not fit.
    """
    check(hidden, weight, labels, bias, terms)
    grads = torch.is_grad_enabled()
    result: torch.Tensor = torch.ops.partool.linear_cross_entropy(
        hidden, weight, bias, labels,
        needs_hidden=grads and hidden.requires_grad,
        needs_weight=grads and weight.requires_grad,
        needs_bias=grads and bias is not None and bias.requires_grad,
        z_loss=terms.z_loss, cap=terms.cap, rows=rows, kernels=mode,
    )[0]  # fmt: skip
    return result


def check(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, terms: Terms
) -> None:
    """Raise ValueError for inputs that do not fit each other."""
    check_logits(hidden, labels, terms)
    others = [weight] if bias is None else [weight, bias]
    if any(x.dtype != hidden.dtype or x.device != hidden.device for x in others):
        named = [f"{x.dtype} on {x.device}" for x in (hidden, *others)]
        raise ValueError(f"hidden state, weight and bias have to be alike, not {', '.join(named)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [list(x.shape) for x in (hidden, *others)]
        raise ValueError(f"hidden state, weight and bias of shapes {', '.join(map(str, shapes))} do not fit")


_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, *, bool needs_hidden, bool needs_weight, "
    "bool needs_bias, float z_loss, float cap, int rows, str kernels) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("partool::linear_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _operator(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
    *, needs_hidden: bool, needs_weight: bool, needs_bias: bool, z_loss: float, cap: float, rows: int, kernels: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the fields of :class:`LossAndGradients`; gradients that are not needed are empty tensors."""
    inputs = Inputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1))
    needs = WantedGradients(needs_hidden, needs_weight, needs_bias)
    results = losses_and_gradients(inputs, How(Terms(z_loss, cap), rows, kernels), needs)
    of_hidden = None if results.hidden is None else results.hidden.view(hidden.shape)
    return results.total, *(hidden.new_empty(0) if x is None else x for x in (of_hidden, results.weight, results.bias))


@_operator.register_fake
def _(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
    *, needs_hidden: bool, needs_weight: bool, needs_bias: bool, z_loss: float, cap: float, rows: int, kernels: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    inputs = Inputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1))
    sums = sum_types(inputs, rows)
    return (
        hidden.new_empty((), dtype=sums[1]),
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape, dtype=sums[0]) if needs_weight else hidden.new_empty(0),
        weight.new_empty(len(weight), dtype=sums[1]) if needs_bias else hidden.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    hidden, weight, *_ = inputs
    ctx.mode, ctx.dtype = keyword_only_inputs["kernels"], hidden.dtype
    ctx.inner = inner_scale(hidden.dtype, len(weight))
    ctx.needs = tuple(keyword_only_inputs[f"needs_{name}"] for name in ("hidden", "weight", "bias"))


def _gradients(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    grads = [
        scaled(x, grad / ctx.inner, ctx.dtype, ctx.mode) if needed else None
        for x, needed in zip(ctx.saved_tensors, ctx.needs, strict=True)
    ]
    return *grads, None


_operator.register_autograd(_gradients, setup_context=_keep)

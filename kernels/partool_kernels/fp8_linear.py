"""Operator for linear maps whose three products, one forward and two backward, multiply 8-bit numbers.

The method follows DeepSeek-V3 (arXiv 2412.19437, section 3.3). Inputs and gradients of results have a scale per 1 x 128
along the width that a product sums over; weights have a scale per 128 x 128. The unconverted input and weights are
saved for the backward pass, so several maps of one input share the saved input. Each gradient is converted together
with its transpose in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partool_kernels.device import uses_triton_8bit
from partool_kernels.fp8.formats import Quantised
from partool_kernels.fp8.op import quantise
from partool_kernels.gemm_a8w8.op import gemm_a8w8


def fp8_linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], dtype: torch.dtype = torch.float8_e4m3fn, mode: str = "auto"
) -> list[torch.Tensor]:
    """Return ``x @ weight.T`` in the type of ``x`` for every weight ``[N, K]``; ``x`` is ``[..., K]``.

    ``x`` is converted once for all weights. The sums of blocks of 128 are added in float32. Any widths work, but the
    kernels are fast only for multiples of 128. ``dtype``: ``float8_e4m3fn``, or ``float8_e4m3fnuz`` on gfx942.
    ``mode`` is as in :func:`partool_kernels.device.uses_triton`. Raises ValueError where widths or types differ.
    """
    for weight in weights:
        if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
            raise ValueError(f"an input {list(x.shape)} does not fit a weight {list(weight.shape)}")
        if weight.dtype != x.dtype or weight.device != x.device:
            types = f"{x.dtype} on {x.device} and {weight.dtype} on {weight.device}"
            raise ValueError(f"input and weight have to be of one type: {types}")
    out: list[torch.Tensor] = torch.ops.partool.fp8_linears(x, list(weights), dtype, mode)
    return out


def product(a: Quantised, b: Quantised, dtype: torch.dtype, mode: str) -> torch.Tensor:
    """Return ``a @ b.T``, computed on GPUs by torch's ``scaled_mm`` or partool's kernel, whichever is faster.

    The mode ``native`` always takes partool's kernel. The two implementations are timed only for widths that are
    multiples of 16, so that the choice also holds for numbers of rows that were not measured.
    """
    widths = (*a.q.shape, len(b.q))
    even = all(width > 0 and width % 16 == 0 for width in widths)
    if mode != "auto" or not a.q.is_cuda or not even or not uses_triton_8bit(mode, a.q.dtype, a.q, b.q):
        return gemm_a8w8(a, b, dtype, mode)
    from partool_kernels.select.here import selector
    from partool_kernels.select.products import scaled

    return scaled(selector(a.q.device), a, b, dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    # reshape(-1, width) could not compute the number of rows where width is 0.
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


@torch.library.custom_op(
    "partool::fp8_linears",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, ScalarType dtype, str mode) -> Tensor[]",
)
def _linears(x: torch.Tensor, weights: Sequence[torch.Tensor], dtype: torch.dtype, mode: str) -> list[torch.Tensor]:
    narrow, _ = quantise(_rows(x), "plain", dtype, mode)
    return [
        product(narrow, quantise(weight, "plain square", dtype, mode)[0], x.dtype, mode).view(
            *x.shape[:-1], weight.shape[0]
        )
        for weight in weights
    ]


@_linears.register_fake
def _(x: torch.Tensor, weights: Sequence[torch.Tensor], dtype: torch.dtype, mode: str) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def of_input(
    grads: Sequence[Quantised], weights: Sequence[torch.Tensor], *, like: torch.Tensor, mode: str
) -> torch.Tensor:
    """Return the input's gradient ``[M, K]`` in the type of ``like``; ``grads`` holds the results' gradients."""
    total: torch.Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        _, turned = quantise(weight, "turned square", grad.q.dtype, mode)
        part = product(grad, turned, like.dtype, mode)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


@torch.library.custom_op(
    "partool::fp8_linears_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor x, Tensor[] weights, bool needs_x, bool[] needs, ScalarType dtype, str mode)"
    " -> (Tensor, Tensor[])",
)
def _backward(  # noqa: PLR0917 - the arguments of an operator
    grads: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    needs_x: bool,
    needs: Sequence[bool],
    dtype: torch.dtype,
    mode: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    flags = ["plain " * needs_x + "turned" * wanted for wanted in needs]
    narrow = [quantise(_rows(grad), flag, dtype, mode) for grad, flag in zip(grads, flags, strict=True)]
    grad_x = x.new_empty(0)
    if needs_x:
        grad_x = of_input([plain for plain, _ in narrow], weights, like=x, mode=mode).view(x.shape)
    if not any(needs):
        return grad_x, [x.new_empty(0) for _ in weights]
    _, x_turned = quantise(_rows(x), "turned", dtype, mode)
    of_weights = [
        product(turned, x_turned, x.dtype, mode) if wanted else x.new_empty(0)
        for (_, turned), wanted in zip(narrow, needs, strict=True)
    ]
    return grad_x, of_weights


@_backward.register_fake
def _(  # noqa: PLR0917 - likewise
    grads: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    needs_x: bool,
    needs: Sequence[bool],
    dtype: torch.dtype,
    mode: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    of_weights = [x.new_empty(weight.shape if wanted else 0) for weight, wanted in zip(weights, needs, strict=True)]
    return x.new_empty(x.shape if needs_x else 0), of_weights


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, ctx.dtype, ctx.mode = inputs
    ctx.save_for_backward(x, *weights)


def _gradients(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    needs_x, needs = ctx.needs_input_grad[0], list(ctx.needs_input_grad[1])
    grad_x, weight_grads = torch.ops.partool.fp8_linears_backward(
        list(grads), x, weights, needs_x, needs, ctx.dtype, ctx.mode
    )
    of_weights = [grad if wanted else None for grad, wanted in zip(weight_grads, needs, strict=True)]
    return grad_x if needs_x else None, of_weights, None, None


_linears.register_autograd(_gradients, setup_context=_keep)
FP8_LINEARS = torch.ops.partool.fp8_linears.default
"""The operator, for recomputation policies that keep the results of products."""

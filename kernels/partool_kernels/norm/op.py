"""Operators for norms of rows; one of them adds a residual before the norm.

The operators save the norm's input and statistics for the backward pass. On GPUs a Triton kernel computes each operator
in one pass over memory; on other devices and in float64, torch computes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from partool_kernels.device import uses_triton
from partool_kernels.direct import Parts, direct, direct_backward
from partool_kernels.norm.describe import KINDS
from partool_kernels.norm.launch import backward, chosen, flags_of, flat, launch

Tensors = tuple[torch.Tensor, ...]


class Norm(NamedTuple):
    """A norm over the last dimension."""

    kind: str
    """``rms`` or ``layer``."""
    eps: float
    weight: torch.Tensor
    """``[H]``, in the input's type."""
    bias: torch.Tensor | None = None
    """``[H]``; only norms of kind ``layer`` have a bias."""


def norm(x: torch.Tensor, how: Norm, mode: str = "auto") -> torch.Tensor:
    """Return the norm of ``x [..., H]`` in the type of ``x``.

    Statistics are computed in float32, for float64 in float64. ``mode`` is as in
    :func:`partool_kernels.device.uses_triton`. Raises ValueError where widths, types or devices do not fit, and for an
    unknown kind.
    """
    _check(x, how)
    out: torch.Tensor = _call_norm(x, how.weight, how.bias, how.eps, how.kind, mode)[0]
    return out


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, how: Norm, mode: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + residual``, rounded to the type of ``x``, and the norm of this sum.

    All these tensors have the same shape ``[..., H]``. ``how``, ``mode`` and errors are as in :func:`norm`.
    """
    _check(x, how)
    if x.shape != residual.shape or x.dtype != residual.dtype or x.device != residual.device:
        raise ValueError(f"x {_words(x)} and residual {_words(residual)} have to be alike")
    total, out, *_ = _call_add_norm(x, residual, how.weight, how.bias, how.eps, how.kind, mode)
    return total, out


def reference(x: torch.Tensor, how: Norm) -> torch.Tensor:
    """Return the norm of ``x``, computed by torch's operators."""
    if how.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], how.weight, how.bias, how.eps)
    wide = x.to(_wide(x))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + how.eps)
    return (wide * scale).to(x.dtype) * how.weight


def _check(x: torch.Tensor, how: Norm) -> None:
    if how.kind not in KINDS:
        raise ValueError(f"no norm {how.kind!r}; there are {', '.join(KINDS)}")
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"x {_words(x)} has to be a floating-point tensor of one dimension or more")
    if how.bias is not None and how.kind != "layer":
        raise ValueError(f"a norm of kind {how.kind!r} has no bias")
    for name, each in (("weight", how.weight), ("bias", how.bias)):
        if each is not None and (each.shape != x.shape[-1:] or each.dtype != x.dtype or each.device != x.device):
            raise ValueError(f"{name} {_words(each)} does not fit x {_words(x)}")


def _words(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _empty_statistics(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised tensors for the mean (no elements for RMSNorm) and the reciprocal standard deviation."""
    rows = x.shape[:-1]
    mean, rstd = (
        torch.empty(size, dtype=_wide(x), device=x.device) for size in (rows if kind == "layer" else (0,), rows)
    )
    return mean, rstd


def _statistics(x: torch.Tensor, eps: float, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(_wide(x))
    if kind == "rms":
        return wide.new_empty(0), torch.rsqrt(wide.square().mean(-1) + eps)
    mean = wide.mean(-1)
    return mean, torch.rsqrt((wide - mean[..., None]).square().mean(-1) + eps)


_SCHEMA = "Tensor weight, Tensor? bias, float eps, str kind, str mode"


def _forward(x: torch.Tensor, residual: torch.Tensor | None, how: Norm) -> Tensors:
    """Run the kernel; return x (or x + residual), and its norm, mean and reciprocal standard deviation."""
    out, (mean, rstd) = _like(x), _empty_statistics(x, how.kind)
    given = {"x": flat(x), "weight": how.weight.contiguous(), "out": flat(out), "mean": mean, "rstd": rstd}
    if how.bias is not None:
        given["bias"] = how.bias.contiguous()
    total = x
    if residual is not None:
        total = _like(x)
        given |= {"residual": flat(residual), "total": flat(total)}
    flags = flags_of(how.kind, how.bias is not None, residual is not None)
    launch("norm_forward", given, flags, chosen("norm_forward", given["x"], flags), how.eps)
    return total, out, mean, rstd


def _compute_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Tensors:
    """Return the norm of ``x``, and its rows' means and reciprocal standard deviations."""
    eps, kind, mode = rest
    how = Norm(kind, eps, weight, bias)
    if uses_triton(mode, x, weight, bias):
        return _forward(x, None, how)[1:]
    return reference(x, how).contiguous(), *_statistics(x, eps, kind)


_norm = torch.library.custom_op(
    "partool::norm", _compute_norm, mutates_args=(), schema=f"(Tensor x, {_SCHEMA}) -> (Tensor, Tensor, Tensor)"
)


@_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Tensors:
    return _like(x), *_empty_statistics(x, rest[1])


def _compute_add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> Tensors:
    """Return ``x + residual``, the norm of this sum, and its rows' means and reciprocal standard deviations."""
    eps, kind, mode = rest
    how = Norm(kind, eps, weight, bias)
    if uses_triton(mode, x, residual, weight, bias):
        return _forward(x, residual, how)
    total = (x + residual).contiguous()
    return total, reference(total, how).contiguous(), *_statistics(total, eps, kind)


_add_norm = torch.library.custom_op(
    "partool::add_norm",
    _compute_add_norm,
    mutates_args=(),
    schema=f"(Tensor x, Tensor residual, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_add_norm.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Tensors:
    return _like(x), _like(x), *_empty_statistics(x, rest[1])


def _compute_backward(grad: torch.Tensor, grad_total: torch.Tensor | None, *rest: Any) -> Tensors:
    """Return the gradients of the norm's input, of the weight and of the bias (empty without a bias)."""
    x, weight, mean, rstd, bias, kind, mode = rest
    if not uses_triton(mode, x, weight, grad, grad_total):
        return _by_torch(grad, grad_total, *rest[:-1])
    grad_x = _like(x)
    given = {"grad": flat(grad), "x": flat(x), "weight": weight.contiguous(), "grad_x": flat(grad_x)}
    given |= {"mean": mean, "rstd": rstd} | ({} if grad_total is None else {"grad_total": flat(grad_total)})
    grad_weight, grad_bias = backward(given, flags_of(kind, bias, grad_total is not None))
    return grad_x, grad_weight.to(x.dtype), x.new_empty(0) if grad_bias is None else grad_bias.to(x.dtype)


_backward = torch.library.custom_op(
    "partool::norm_backward",
    _compute_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor? grad_total, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "bool bias, str kind, str mode) -> (Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(grad: torch.Tensor, grad_total: torch.Tensor | None, *rest: Any) -> Tensors:
    x, weight, _, _, bias, *_ = rest
    return _like(x), _like(weight), _like(weight) if bias else x.new_empty(0)


def _by_torch(grad: torch.Tensor, grad_total: torch.Tensor | None, *rest: Any) -> Tensors:
    """Return the gradients by torch's operators, without autograd, which is disabled inside an operator."""
    x, weight, mean, rstd, bias, kind = rest
    type_, rows = _wide(x), tuple(range(x.ndim - 1))
    wide, centre = grad.to(type_), mean[..., None] if kind == "layer" else 0.0
    normed = (x.to(type_) - centre) * rstd[..., None]
    weighted = wide * weight.to(type_)
    change = weighted - normed * (weighted * normed).mean(-1, keepdim=True)
    if kind == "layer":
        change = change - weighted.mean(-1, keepdim=True)
    grad_x = change * rstd[..., None]
    if grad_total is not None:
        grad_x = grad_x + grad_total
    grad_weight = (wide * normed).sum(rows) if rows else wide * normed
    grad_bias = (wide.sum(rows) if rows else wide.clone()) if bias else x.new_empty(0)
    return tuple(each.to(x.dtype).contiguous() for each in (grad_x, grad_weight, grad_bias))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *matrices, weight, bias, _, ctx.kind, ctx.mode = inputs
    ctx.bias = bias is not None
    *results, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    # Save the norm's input: the residual sum, which is the first result, or x itself.
    ctx.save_for_backward(results[0] if len(matrices) == 2 else matrices[0], weight, mean, rstd)


def _gradients(ctx: Any, grad: torch.Tensor, grad_total: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    grads: tuple[torch.Tensor, ...] = _call_backward(grad, grad_total, *ctx.saved_tensors, ctx.bias, ctx.kind, ctx.mode)
    return grads


def _of_norm(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_weight, grad_bias = _gradients(ctx, grad, None)
    return grad_x, grad_weight, grad_bias if ctx.bias else None, None, None, None


def _of_add_norm(ctx: Any, grad_total: torch.Tensor, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_weight, grad_bias = _gradients(ctx, grad, grad_total)
    return grad_x, grad_x, grad_weight, grad_bias if ctx.bias else None, None, None, None


_norm.register_autograd(_of_norm, setup_context=_keep)
_add_norm.register_autograd(_of_add_norm, setup_context=_keep)
_call_norm = direct("norm", Parts(_compute_norm, _keep, _of_norm))
_call_add_norm = direct("add_norm", Parts(_compute_add_norm, _keep, _of_add_norm))
_call_backward = direct_backward("norm_backward", _compute_backward)

"""Operators for the cross entropy of logits with a whole or a sharded vocabulary; gradients may overwrite logits.

The loss of a row is ``log Z − target + z_loss · (log Z)²``, where Z is the sum of exponentials. The last term keeps Z
near 1 (PaLM, arXiv 2204.02311, section 5). With a ``cap`` the logits are first capped to ``cap · tanh(logit / cap)``
(Gemma 2, arXiv 2408.00118, section 2). Rows whose label is :data:`IGNORED` have loss 0 and gradient 0 for any
logits. Triton kernels compute the loss on GPUs; torch computes it on other devices and in float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from partool_kernels.cross_entropy.by_torch import IGNORED, losses_of, parts_of, write_gradient
from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.registry import Config

# Operators name the mode ``kernels``: a keyword ``mode`` would collide with an argument that torch uses itself.

__all__ = ["IGNORED", "PLAIN", "Terms", "check", "cross_entropy", "inner_scale", "scaled"]


class Terms(NamedTuple):
    """Options that change the definition of cross entropy."""

    z_loss: float = 0.0
    """Weight of the squared logarithm of the sum of exponentials."""
    cap: float = 0.0
    """Bound of the logits' magnitudes; 0 means that they are not capped."""


PLAIN = Terms()


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, terms: Terms = PLAIN, mode: str = "auto", *, in_place: bool = False
) -> torch.Tensor:
    """Return the sum of the losses of ``logits [..., V]`` and ``labels [...]``, a scalar in float32 or float64.

    The gradient is computed together with the loss. ``in_place`` overwrites the logits with the gradient, so nothing
    else may need the logits; autograd raises an error where another backward pass needs them. ``mode`` is as in
    :func:`partool_kernels.device.uses_triton`. Raises ValueError where shapes, types or devices do not fit, and for a
    leaf that would be overwritten. A label outside the columns raises ValueError on the CPU; on GPUs it makes loss and
    gradient NaN.
    """
    check(logits, labels, terms)
    flat, rows = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    gradient = torch.is_grad_enabled() and logits.requires_grad
    if in_place and gradient:
        if logits.is_leaf:
            raise ValueError("the gradient cannot overwrite logits that are a leaf: their values would be lost")
        # ``reshape`` may copy strided logits; the gradient then overwrites the copy, with the same result.
        total: torch.Tensor = _InPlace.apply(flat, rows, terms, mode)  # type: ignore[no-untyped-call]
        return total
    operator = torch.ops.partool.cross_entropy
    result: torch.Tensor = operator(flat, rows, z_loss=terms.z_loss, cap=terms.cap, gradient=gradient, kernels=mode)[0]
    return result


def check(logits: torch.Tensor, labels: torch.Tensor, terms: Terms) -> None:
    """Raise ValueError for logits and labels that do not fit each other, and for invalid terms."""
    if logits.ndim == 0 or logits.shape[:-1] != labels.shape or logits.device != labels.device:
        message = f"logits {list(logits.shape)} on {logits.device} and labels {list(labels.shape)} on {labels.device}"
        raise ValueError(f"{message}: there has to be a label for each row, on the same device")
    if not logits.is_floating_point() or logits.itemsize == 1 or labels.dtype != torch.int64:
        raise ValueError(f"no loss of {logits.dtype} logits and {labels.dtype} labels: floats and int64 are needed")
    if not (0.0 <= terms.cap < math.inf and math.isfinite(terms.z_loss)):
        raise ValueError(f"z_loss {terms.z_loss} must be finite, cap {terms.cap} finite and not below 0")


def inner_scale(dtype: torch.dtype, vocabulary: int) -> float:
    """Return a power of two that multiplies gradients of logits until the gradient of the loss is known.

    The scale lifts the probabilities of a large vocabulary above float16's smallest normal number, 2⁻¹⁴; below that
    number they would lose digits.
    """
    return float(2 ** max(0, math.ceil(math.log2(max(1, vocabulary))) - 14)) if dtype == torch.float16 else 1.0


def scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, mode: str = "auto") -> torch.Tensor:
    """Return ``x`` times ``factor``, a scalar tensor, in type ``dtype``.

    Only the product is rounded; torch would also round the factor.
    """
    result: torch.Tensor = torch.ops.partool.scaled(x, factor, dtype, mode)
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous columns; it is copied only where its columns are not contiguous."""
    return x if x.stride(-1) == 1 or (x.shape[-1] == 1 and x.is_contiguous()) else x.contiguous()


def _share_memory(x: torch.Tensor) -> bool:
    """Return whether rows of ``x`` share memory, as in an expanded tensor; columns have to be contiguous."""
    return len(x) > 1 and x.stride(0) < x.shape[1]


def _check_places(x: torch.Tensor) -> None:
    """Raise ValueError where columns are not contiguous or rows share memory: a kernel cannot overwrite such logits."""
    if (x.shape[1] > 1 and x.stride(1) != 1) or _share_memory(x):
        strides = f"logits {list(x.shape)} with strides {list(x.stride())}"
        raise ValueError(f"{strides} cannot be overwritten: columns have to be neighbours, and rows apart")


@torch.library.custom_op(
    "partool::cross_entropy_",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor labels, *, float z_loss, float cap, float scale, str kernels) -> Tensor",
)
def _in_place(
    logits: torch.Tensor, labels: torch.Tensor, *, z_loss: float, cap: float, scale: float, kernels: str
) -> torch.Tensor:
    """Return the losses of rows, and overwrite the logits with gradients · ``scale``; columns must be contiguous."""
    return _computed(logits, labels, logits, terms=Terms(z_loss, cap), scale=scale, mode=kernels)


@_in_place.register_fake
def _(
    logits: torch.Tensor, labels: torch.Tensor, *, z_loss: float, cap: float, scale: float, kernels: str
) -> torch.Tensor:
    return logits.new_empty(labels.shape, dtype=_wide(logits.dtype))


def _computed(
    logits: torch.Tensor, labels: torch.Tensor, out: torch.Tensor | None, *, terms: Terms, scale: float, mode: str
) -> torch.Tensor:
    """Return the losses of rows; if ``out`` is given, write the gradients times ``scale`` to it."""
    if not uses_triton(mode, logits):
        losses, log_totals = losses_of(logits, labels, terms.z_loss, terms.cap)
        if out is not None:
            factor = logits.new_full((), scale, dtype=log_totals.dtype)
            write_gradient(out, logits, labels, log_totals, factor, terms=terms)
        return losses
    if out is logits:
        _check_places(logits)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    launch_whole((logits, labels, logits if out is None else out, losses), terms, scale, gradient=out is not None)
    return losses


@torch.library.custom_op(
    "partool::cross_entropy",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, *, float z_loss, float cap, bool gradient, str kernels) -> (Tensor, Tensor)",
)
def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, z_loss: float, cap: float, gradient: bool, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of rows, and with ``gradient`` also the sum's gradient times :func:`inner_scale`."""
    flat = _side_by_side(logits)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if gradient else None
    inner = inner_scale(logits.dtype, logits.shape[1])
    losses = _computed(flat, labels, out, terms=Terms(z_loss, cap), scale=inner, mode=kernels)
    return losses.sum(), logits.new_empty(0) if out is None else out


@_cross_entropy.register_fake
def _(
    logits: torch.Tensor, labels: torch.Tensor, *, z_loss: float, cap: float, gradient: bool, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    total = logits.new_empty((), dtype=_wide(logits.dtype))
    return total, torch.empty(logits.shape if gradient else (0,), dtype=logits.dtype, device=logits.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.mode = keyword_only_inputs["kernels"]


def _gradients(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, None]:
    (gradient,) = ctx.saved_tensors
    if grad is None:
        return None, None
    return scaled(gradient, grad / inner_scale(gradient.dtype, gradient.shape[-1]), gradient.dtype, ctx.mode), None


_cross_entropy.register_autograd(_gradients, setup_context=_keep)


class _InPlace(torch.autograd.Function):
    """The loss whose gradient overwrites the logits; the backward pass only scales the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, terms: Terms, mode: str) -> torch.Tensor:
        flat = _side_by_side(logits)
        if _share_memory(flat):
            flat = flat.contiguous()
        inner = inner_scale(logits.dtype, logits.shape[1])
        losses: torch.Tensor = torch.ops.partool.cross_entropy_(
            flat, labels, z_loss=terms.z_loss, cap=terms.cap, scale=inner, kernels=mode
        )
        ctx.save_for_backward(flat)
        ctx.inner, ctx.mode = inner, mode
        return losses.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, grad / ctx.inner, gradient.dtype, ctx.mode), None, None, None


@torch.library.custom_op(
    "partool::cross_entropy_parts",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, int first, float cap, str mode) -> Tensor",
)
def _parts(logits: torch.Tensor, labels: torch.Tensor, first: int, cap: float, mode: str) -> torch.Tensor:
    """Return each row's largest logit, sum of ``exp(logit - largest)`` and label's logit in a shard, ``[3, rows]``."""
    if not uses_triton(mode, logits):
        return parts_of(logits, labels, first, cap)
    parts = torch.empty(3, *labels.shape, dtype=torch.float32, device=logits.device)
    launch_parts((_side_by_side(logits), labels, parts), first, cap)
    return parts


@_parts.register_fake
def _(logits: torch.Tensor, labels: torch.Tensor, first: int, cap: float, mode: str) -> torch.Tensor:
    return logits.new_empty((3, *labels.shape), dtype=_wide(logits.dtype))


@torch.library.custom_op(
    "partool::cross_entropy_gradient_",
    mutates_args=("logits",),
    schema=(
        "(Tensor(a!) logits, Tensor labels, Tensor log_totals, Tensor scale, *, int first, float z_loss, float cap, "
        "str kernels) -> ()"
    ),
)
def _gradient(
    logits: torch.Tensor, labels: torch.Tensor, log_totals: torch.Tensor, scale: torch.Tensor,
    *, first: int, z_loss: float, cap: float, kernels: str,
) -> None:  # fmt: skip
    """Overwrite the logits of a vocabulary shard with gradients times ``scale``.

    ``log_totals`` are the logarithms of the sums of exponentials over the whole vocabulary.
    """
    if not uses_triton(kernels, logits):
        write_gradient(
            logits, logits, labels - first, log_totals, scale, terms=(z_loss, cap), ignored=labels == IGNORED
        )
        return
    _check_places(logits)
    tensors = (logits, labels, log_totals.contiguous(), scale.float(), logits)
    launch_gradient(tensors, first, Terms(z_loss, cap))


@_gradient.register_fake
def _(
    logits: torch.Tensor, labels: torch.Tensor, log_totals: torch.Tensor, scale: torch.Tensor,
    *, first: int, z_loss: float, cap: float, kernels: str,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op(
    "partool::scaled",
    mutates_args=(),
    schema="(Tensor x, Tensor factor, ScalarType dtype, str mode) -> Tensor",
)
def _scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, mode: str) -> torch.Tensor:
    if not uses_triton(mode, x) or not uses_triton(mode, factor):
        return (x.to(_wide(x.dtype)) * factor).to(dtype)
    flat = x.contiguous().view(-1, x.shape[-1] if x.ndim else 1)
    out = torch.empty(flat.shape, dtype=dtype, device=x.device)
    launch_scaled((flat, factor.float(), out))
    return out.view(x.shape)


@_scaled.register_fake
def _(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, mode: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def launch_whole(
    tensors: tuple[torch.Tensor, ...], terms: Terms, scale: float, config: Config | None = None, *, gradient: bool
) -> None:
    """Run the kernel ``cross_entropy``; ``tensors`` are logits, labels, and the outputs for gradient and losses."""
    from partool_kernels.cross_entropy import kernel

    logits, labels, out, _ = tensors
    flags = ("gradient",) if gradient else ()
    config = config or _choice("cross_entropy", logits, terms.cap, flags)
    with on(logits.device):
        kernel.cross_entropy[(logits.shape[0],)](
            logits, labels.contiguous(), *tensors[2:], logits.stride(0), out.stride(0), logits.shape[1],
            float(scale), float(terms.z_loss), float(terms.cap), CAP=terms.cap > 0, GRADIENT=gradient,
            **launch_options(config, logits.device),
        )  # fmt: skip


def launch_parts(tensors: tuple[torch.Tensor, ...], first: int, cap: float, config: Config | None = None) -> None:
    """Run the kernel ``cross_entropy_parts``; ``tensors`` are logits, labels and the output ``[3, rows]``."""
    from partool_kernels.cross_entropy import kernel

    logits, labels, parts = tensors
    config = config or _choice("cross_entropy_parts", logits, cap)
    with on(logits.device):
        kernel.cross_entropy_parts[(logits.shape[0],)](
            logits, labels.contiguous(), *parts.unbind(), logits.stride(0), logits.shape[1], first,
            float(cap), CAP=cap > 0, **launch_options(config, logits.device),
        )  # fmt: skip


def launch_gradient(tensors: tuple[torch.Tensor, ...], first: int, terms: Terms, config: Config | None = None) -> None:
    """Run the kernel ``cross_entropy_gradient``.

    ``tensors`` are logits, labels, logarithms of the sums of exponentials, scale, and the output for the gradient.
    """
    from partool_kernels.cross_entropy import kernel

    logits, labels, log_totals, scale, out = tensors
    config = config or _choice("cross_entropy_gradient", logits, terms.cap)
    with on(logits.device):
        kernel.cross_entropy_gradient[(logits.shape[0],)](
            logits, labels.contiguous(), log_totals, scale, out, logits.stride(0), out.stride(0), logits.shape[1],
            first, float(terms.z_loss), float(terms.cap), CAP=terms.cap > 0, **launch_options(config, logits.device),
        )  # fmt: skip


def launch_scaled(tensors: tuple[torch.Tensor, ...], config: Config | None = None) -> None:
    """Run the kernel ``scaled``; ``tensors`` are the contiguous input ``[rows, n]``, the factor and the output."""
    from partool_kernels.cross_entropy import kernel

    x, factor, out = tensors
    rows, columns = x.shape
    config = config or choose(KernelCall("scaled", (x.dtype, out.dtype), (("n", columns),), rows), x.device).config
    grid = (rows, -(-columns // config.constants["BLOCK"]))
    with on(x.device):
        kernel.scaled[grid](x, factor, out, columns, **launch_options(config, x.device))


def _choice(name: str, logits: torch.Tensor, cap: float, flags: tuple[str, ...] = ()) -> Config:
    flags = ("cap", *flags) if cap > 0 else flags
    rows, columns = logits.shape
    return choose(KernelCall(name, (logits.dtype,), (("v", columns),), rows, flags), logits.device).config

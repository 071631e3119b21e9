"""With ``precision: fp8``, linear layers inside blocks multiply in 8 bits, forward and backward; the rest uses bf16.

Embeddings, norms, the products of attention, routers of experts and the head stay in bf16. A layer with a width that
is not a multiple of 16 also stays in bf16, because 8-bit matrix units do not accept this width. See
:mod:`partool_kernels.fp8_linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from partool.layout.gemms import MULTIPLE
from partool.plan.types import Plan
from partool_kernels.device import architecture
from partool_kernels.fp8.formats import Quantised
from partool_kernels.fp8.op import quantise
from partool_kernels.fp8_linear import fp8_linears, of_input, product
from partool_kernels.registry import ARCHITECTURES
from partool_runtime import deferral
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.patches import has_patched_forward
from partool_runtime.model.attention import SelfAttention
from partool_runtime.model.ffn import FeedForward
from partool_runtime.model.projection import SEPARATE, Linear, Projection


class Fp8Linear(Linear):
    """A projection that multiplies in 8 bits; its weight is the same as in :class:`torch.nn.Linear`."""

    fits: bool
    """Whether the widths of this rank's part of the layer allow 8 bits; communication does not depend on it."""
    narrow: torch.dtype
    """The 8-bit type of the factors of a product."""
    mode: str
    """Whether kernels or torch compute the product, see :func:`partool_kernels.device.uses_triton`."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """None, since exchanges that are fused with products do not multiply in 8 bits."""
        return None

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """See :class:`Projection`."""
        (out,) = products(x, (self,), biased=biased)
        return out


class TogetherInFp8:
    """:class:`InputProducts` that convert their input to 8 bits once for all projections."""

    joint = True

    def __call__(self, x: torch.Tensor, projections: Sequence[Projection]) -> tuple[torch.Tensor, ...]:
        """See :class:`InputProducts`."""
        return products(x, projections)


_TOGETHER = TogetherInFp8()


def use_fp8(blocks: Iterable[nn.Module], plan: Plan, device: torch.device) -> None:
    """Change the linear layers of ``blocks`` in place, so that they multiply in 8 bits where the plan says so.

    Call it when the layers have their final shapes on the rank. Raises ConfigurationError PT658 if the device's matrix
    units have no 8-bit type, if kernels are not compiled for the device, or if a block has no ``nn.Linear`` to convert.
    """
    if plan.training.precision != "fp8":
        return
    dtype, mode = narrow_type(device, plan.kernels.mode), plan.kernels.mode
    if plan.training.deterministic and mode == "auto":
        mode = "native"  # with auto each process chooses by its own timing, and kernels differ in the last digits
    for block in blocks:
        has_linear = False
        for name, module in list(block.named_modules()):
            if type(module) in (nn.Linear, Linear) and not has_patched_forward(module) and not _is_router(name, block):
                module.__class__, has_linear = Fp8Linear, True
                fp8: Any = module
                fp8.fits = all(width > 0 and width % MULTIPLE == 0 for width in fp8.weight.shape)
                fp8.narrow, fp8.mode = dtype, mode
        if not has_linear:
            message = f"{type(block).__name__} has no torch.nn.Linear that could multiply in 8 bits"
            raise ConfigurationError("PT658", message, "Plan it again with training.precision: bf16.")
        if not plan.layout.data.leaves:  # leaves gather their parameters when they are called
            _share_inputs(block, attention=plan.layout.mesh.cp == 1)


def narrow_type(device: torch.device, mode: str) -> torch.dtype:
    """Return the 8-bit type that a device can multiply; raises the errors of :func:`use_fp8`.

    On CPUs and with ``mode`` "torch" the result is the OCP type, whose products are emulated.
    """
    if device.type == "cpu" or mode == "torch":
        return torch.float8_e4m3fn
    device_kind = architecture(device)
    name = ARCHITECTURES[device_kind].fp8 if device_kind is not None else None
    if name is None:
        message = f"there are no products in 8 bits for {torch.cuda.get_device_name(device)}"
        raise ConfigurationError("PT658", message, "Plan it again with training.precision: bf16.")
    return cast(torch.dtype, getattr(torch, name))


def _is_router(name: str, block: nn.Module) -> bool:
    """Return whether a layer selects experts; routers stay in bf16, because small differences change the selection."""
    parent, _, leaf = name.rpartition(".")
    return leaf in {"gate", "router", "shared_expert_gate"} and hasattr(block.get_submodule(parent), "experts")


def _share_inputs(block: nn.Module, *, attention: bool) -> None:
    """Let layers that read the same input convert this input to 8 bits only once.

    Tensor parallelism has separate code for this sharing. Without ``attention`` only feed-forward layers share an
    input; sequence ranks need this, since they send queries, keys and values one by one.
    """
    kinds = (SelfAttention, FeedForward) if attention else (FeedForward,)
    for module in block.modules():
        if isinstance(module, kinds) and module.inputs is SEPARATE:
            module.inputs = _TOGETHER


def products(x: torch.Tensor, projections: Sequence[Projection], *, biased: bool = True) -> tuple[torch.Tensor, ...]:
    """Return the products of projections that share the input ``x``; each computes in 8 bits or bf16.

    Without ``biased`` no bias is added. Inside ``splitting`` the weight gradients can be deferred. A projection that
    wraps one in 8 bits converts the input by itself.
    """
    # Layers are not compared by id, for which torch.compile would recompile every block.
    narrow = [each for each in projections if isinstance(each, Fp8Linear) and each.fits]
    in_8_bits = [_apart(x, linear) for linear in narrow] if deferral.is_splitting() else _together(x, narrow)
    out, taken = [], 0
    for projection in projections:
        if isinstance(projection, Fp8Linear):
            bias = projection.bias if biased else None
            if not projection.fits:
                out.append(deferral.linear(x, projection.weight, bias))
                continue
            out.append(in_8_bits[taken] if bias is None else in_8_bits[taken] + bias)
            taken += 1
        else:
            out.append(projection.product(x, biased=biased))
    return tuple(out)


def _together(x: torch.Tensor, linears: Sequence[Fp8Linear]) -> list[torch.Tensor]:
    if not linears:
        return []
    return fp8_linears(x, [linear.weight for linear in linears], linears[0].narrow, linears[0].mode)


def _apart(x: torch.Tensor, linear: Fp8Linear) -> torch.Tensor:
    """Return the product of ``x`` and a single layer's weight; the weight gradient can be deferred."""
    if not torch.is_grad_enabled() or not linear.weight.requires_grad:
        return _together(x, [linear])[0]
    out: torch.Tensor = _Split.apply(x, linear.weight, linear.narrow, linear.mode)  # type: ignore[no-untyped-call]
    return out


class _Split(torch.autograd.Function):
    """A product in 8 bits whose backward pass can defer the gradient of the weight."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, mode: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # The parameter object itself: later gradients are added to it, independent of saved-tensor hooks.
        ctx.weight, ctx.dtype, ctx.mode = weight, dtype, mode  # type: ignore[attr-defined]
        return fp8_linears(x, [weight], dtype, mode)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        flags = "plain " * needs_x + "turned" * needs_weight
        plain, turned = quantise(_rows(grad), flags, ctx.dtype, ctx.mode)
        grad_x = of_input([plain], [weight], like=x, mode=ctx.mode).view(x.shape) if needs_x else None
        if not needs_weight:
            return grad_x, None, None, None
        # Detached, so that deferred work does not keep the graph that made x alive.
        weight_grad: Callable[[], torch.Tensor] = partial(_of_weight, turned, x.detach(), ctx.mode)
        if not weight.is_leaf or not deferral.defer(lambda: deferral.add_gradient(ctx.weight, weight_grad())):
            return grad_x, weight_grad(), None, None
        return grad_x, None, None, None


def _of_weight(grad: Quantised, x: torch.Tensor, mode: str) -> torch.Tensor:
    _, turned = quantise(_rows(x), "turned", grad.q.dtype, mode)
    return product(grad, turned, x.dtype, mode)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2) if x.ndim > 1 else x[None]

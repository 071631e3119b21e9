"""``activation(gate) · up`` as one operator that saves only gate and up for its backward pass.

On GPUs a Triton kernel computes it in one pass over memory; elsewhere, and in float64, torch computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.direct import Parts, direct, direct_backward
from partool_kernels.glu.describe import KINDS
from partool_kernels.registry import Config

_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def glu(gate: torch.Tensor, up: torch.Tensor, kind: str, mode: str = "auto") -> torch.Tensor:
    """Return ``activation(gate) * up``; ``gate`` and ``up`` have equal shapes ``[..., F]`` and equal types.

    ``kind`` is ``silu``, ``gelu`` or ``gelu_tanh``; ``mode`` is as in :func:`partool_kernels.device.uses_triton`.
    Raises ValueError where shapes, types or devices differ, and for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no activation {kind!r}; there are {', '.join(KINDS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise ValueError(f"gate {_words(gate)} and up {_words(up)} have to be alike")
    out: torch.Tensor = _call(gate, up, kind, mode)
    return out


def reference(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Return ``activation(gate) * up``, computed by torch's operators."""
    return _activation(gate, kind) * up


def _words(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _activation(gate: torch.Tensor, kind: str) -> torch.Tensor:
    return F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=_APPROXIMATE[kind])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as ``[rows, F]`` with contiguous columns; it is copied only where no view is possible."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _compute(gate: torch.Tensor, up: torch.Tensor, kind: str, mode: str) -> torch.Tensor:
    if not uses_triton(mode, gate, up):
        return reference(gate, up, kind).contiguous()
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch("glu_forward", (_rows(gate), _rows(up), out.view(-1, out.shape[-1])), kind)
    return out


_glu = torch.library.custom_op(
    "partool::glu", _compute, mutates_args=(), schema="(Tensor gate, Tensor up, str kind, str mode) -> Tensor"
)


@_glu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, kind: str, mode: str) -> torch.Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _compute_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if not uses_triton(mode, gate, up, grad):
        # The gradients are written out, as autograd is switched off inside of an operator.
        grad_act = grad * up
        if kind == "silu":
            grad_gate = torch.ops.aten.silu_backward(grad_act, gate)
        else:
            grad_gate = torch.ops.aten.gelu_backward(grad_act, gate, approximate=_APPROXIMATE[kind])
        return grad_gate.contiguous(), (grad * _activation(gate, kind)).contiguous()
    made = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    flat = tuple(x.view(-1, x.shape[-1]) for x in made)
    launch("glu_backward", (_rows(grad), _rows(gate), _rows(up), *flat), kind)
    return made[0], made[1]


_backward = torch.library.custom_op(
    "partool::glu_backward",
    _compute_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor gate, Tensor up, str kind, str mode) -> (Tensor, Tensor)",
)


@_backward.register_fake
def _(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), torch.empty_like(
        up, memory_format=torch.contiguous_format
    )


def launch(name: str, tensors: tuple[torch.Tensor, ...], kind: str, config: Config | None = None) -> None:
    """Run the kernel ``name`` on inputs and outputs ``[rows, F]``.

    Without ``config`` the registry chooses the configuration.
    """
    from partool_kernels.glu import kernel

    rows, columns = tensors[0].shape
    device, dtype = tensors[0].device, tensors[0].dtype
    config = config or choose(KernelCall(name, (dtype,), (("f", columns),), rows, (kind,)), device).config
    strides = tuple(x.stride(0) for x in tensors)
    grid = (rows, -(-columns // config.constants["BLOCK"]))
    with on(device):
        getattr(kernel, name)[grid](*tensors, *strides, columns, KIND=kind, **launch_options(config, device))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.kind, ctx.mode = inputs
    ctx.save_for_backward(gate, up)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return *_call_backward(grad, *ctx.saved_tensors, ctx.kind, ctx.mode), None, None


_glu.register_autograd(_gradients, setup_context=_keep)
_call = direct("glu", Parts(_compute, _keep, _gradients))
_call_backward = direct_backward("glu_backward", _compute_backward)

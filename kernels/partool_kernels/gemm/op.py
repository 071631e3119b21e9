"""Differentiable ``a @ b`` by a Triton kernel; the gradients are products in other layouts by the same kernel."""

from __future__ import annotations

from typing import Any

import torch

from partool_kernels.device import KernelCall, choose, interpreting, launch_options, on, uses_triton
from partool_kernels.gemm.describe import FORMS
from partool_kernels.registry import Config


def gemm(a: torch.Tensor, b: torch.Tensor, mode: str = "auto") -> torch.Tensor:
    """Return ``a [M, K] @ b [K, N]`` in the type of ``a`` and ``b``; every run gives the same bits.

    Sums are in float32. For a weight ``[N, K]`` of ``nn.Linear`` pass ``weight.T``, which copies nothing. Products of
    float32 use full precision if ``torch.get_float32_matmul_precision`` returns ``highest``, and otherwise TF32 on
    NVIDIA. ``mode`` is as in ``partool_kernels.device.uses_triton``. Raises ValueError where shapes, types or devices
    do not fit.
    """
    fits = a.dim() == b.dim() == 2 and a.shape[-1] == b.shape[0]
    if not fits or a.dtype != b.dtype or a.device != b.device or not a.is_floating_point():
        raise ValueError(f"no product of {_words(a)} and {_words(b)}")
    out: torch.Tensor = torch.ops.partool.gemm(a, b, mode)
    return out


def _words(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


@torch.library.custom_op("partool::gemm", mutates_args=(), schema="(Tensor a, Tensor b, str mode) -> Tensor")
def _gemm(a: torch.Tensor, b: torch.Tensor, mode: str) -> torch.Tensor:
    if not uses_triton(mode, a, b):
        return a @ b
    out = a.new_empty(a.shape[0], b.shape[1])
    launch(dense(a), dense(b), out)
    return out


@_gemm.register_fake
def _(a: torch.Tensor, b: torch.Tensor, mode: str) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return the matrix with stride 1 along rows or along columns; it is copied only if it has no such stride."""
    return x if 1 in x.stride()[-2:] else x.contiguous()


def form_of(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the entry of ``describe.FORMS`` for the memory layout of two matrices."""
    return "".join("n" if x.stride(-1) == 1 else "t" for x in (a, b))


def precision(a: torch.Tensor) -> tuple[str, ...]:
    """Return the flag ``tf32`` where torch's product would use TF32, otherwise no flag."""
    tf32 = a.dtype == torch.float32 and a.is_cuda and torch.version.hip is None
    return ("tf32",) if tf32 and torch.get_float32_matmul_precision() != "highest" else ()


def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: Config | None = None) -> None:
    """Write ``a @ b`` to ``out``, whose columns are contiguous.

    Without ``config`` the registry chooses the configuration.
    """
    from partool_kernels.gemm import kernel

    (rows, inner), columns, device, form = a.shape, b.shape[1], a.device, form_of(a, b)
    assert form in FORMS
    tf32 = precision(a)
    call = KernelCall("gemm", (a.dtype, out.dtype), (("n", columns), ("k", inner)), rows, (form, *tf32))
    config = config or choose(call, device).config
    blocks = config.constants
    split = blocks["SPLIT"]
    tiles = -(-rows // blocks["BLOCK_M"]) * -(-columns // blocks["BLOCK_N"])
    parts = out if split == 1 else torch.empty(split, rows, columns, dtype=torch.float32, device=device)
    options: dict[str, Any] = launch_options(config, device)
    options |= {
        "WHOLE": inner % (blocks["BLOCK_K"] * split) == 0,
        "PRECISION": "tf32" if tf32 else "ieee",
        "UPCAST": interpreting(),
    }
    with on(device):
        kernel.gemm[tiles * split,](
            *(a, b, parts, rows, columns, inner, *a.stride(), *b.stride()),
            *(parts.stride(-2), rows * columns),
            **options,
        )
    if split > 1:
        launch_sum(parts, out)


def launch_sum(parts: torch.Tensor, out: torch.Tensor, config: Config | None = None) -> None:
    """Write the sum over P of ``parts [P, M, N]``, which are contiguous float32, to ``out [M, N]``."""
    from partool_kernels.gemm import kernel

    (count, rows, columns), device = parts.shape, out.device
    call = KernelCall("gemm_sum", (out.dtype,), (("n", columns), ("parts", count)), rows)
    config = config or choose(call, device).config
    size = rows * columns
    with on(device):
        kernel.gemm_sum[-(-size // config.constants["BLOCK"]),](
            parts, out, size, columns, size, out.stride(0), PARTS=count, **launch_options(config, device)
        )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.mode = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    wanted_a, wanted_b, _ = ctx.needs_input_grad
    grad_a = torch.ops.partool.gemm(grad, b.T, ctx.mode) if wanted_a else None
    # The gradient is computed as (grad^T a)^T, which has b's memory layout if b is the transpose of a weight.
    grad_b = torch.ops.partool.gemm(grad.T, a, ctx.mode).T if wanted_b else None
    return grad_a, grad_b, None


_gemm.register_autograd(_gradients, setup_context=_keep)

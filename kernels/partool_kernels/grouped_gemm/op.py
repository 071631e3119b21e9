"""Differentiable operator that multiplies each expert's rows with the matrix of the expert."""

from __future__ import annotations

from typing import Any

import torch

from partool_kernels.device import KernelCall, choose, interpreting, launch_options, on, uses_triton
from partool_kernels.gemm.op import precision
from partool_kernels.grouped_gemm.describe import power_above
from partool_kernels.registry import Config


def grouped_gemm(
    rows_RK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor, mode: str = "auto"
) -> torch.Tensor:
    """Multiply every row with the matrix of its expert and return ``[R, N]``; rows without an expert become zeros.

    ``ends_E``, int64 on the device, holds the index after each expert's last row, in ascending order
    (``partool_kernels.moe.op.route``). Matrices may be transposes, ``[E, N, K].mT``. The host does not wait for the
    device. ``mode`` is as in ``partool_kernels.device.uses_triton``. Raises ValueError where shapes, types or devices
    do not fit.
    """
    fits = rows_RK.dim() == 2 and weights_EKN.dim() == 3 and rows_RK.shape[1] == weights_EKN.shape[1]
    alike = rows_RK.dtype == weights_EKN.dtype and rows_RK.device == weights_EKN.device == ends_E.device
    if not fits or not alike or ends_E.dtype != torch.int64 or ends_E.shape != weights_EKN.shape[:1]:
        words = [f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (rows_RK, weights_EKN, ends_E)]
        raise ValueError(f"no grouped product of rows {words[0]} and matrices {words[1]} with ends {words[2]}")
    out: torch.Tensor = torch.ops.partool.grouped_gemm(rows_RK, weights_EKN, ends_E, mode)
    return out


def loop(rows_RK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return the result of :func:`grouped_gemm`, computed by one torch product per expert.

    ``ends_E`` is copied to the host.
    """
    ends = ends_E.tolist()
    parts = [
        rows_RK[start:end] @ matrix
        for start, end, matrix in zip([0, *ends[:-1]], ends, weights_EKN.unbind(), strict=True)
    ]
    return torch.cat([*parts, rows_RK.new_zeros(len(rows_RK) - ends[-1], weights_EKN.shape[2])])


def _written(
    rows_RK: torch.Tensor, weights_EKN: torch.Tensor, ends_E: torch.Tensor, out_RN: torch.Tensor
) -> torch.Tensor:
    """Write what :func:`loop` returns to ``out_RN``, without a second copy; autograd cannot follow this."""
    ends = ends_E.tolist()
    for start, end, matrix in zip([0, *ends[:-1]], ends, weights_EKN.unbind(), strict=True):
        torch.mm(rows_RK[start:end], matrix, out=out_RN[start:end])
    out_RN[ends[-1] :].zero_()
    return out_RN


@torch.library.custom_op(
    "partool::grouped_gemm",
    mutates_args=(),
    schema="(Tensor rows, Tensor weights, Tensor ends, str mode) -> Tensor",
)
def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, mode: str) -> torch.Tensor:
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    if not uses_triton(mode, rows, weights):
        return _written(rows, weights, ends, out)
    launch((_rows(rows), _dense(weights)), ends.contiguous(), out)
    return out


@_grouped.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, mode: str) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@torch.library.custom_op(
    "partool::grouped_gemm_weight",
    mutates_args=(),
    schema="(Tensor rows, Tensor grad, Tensor ends, str mode) -> Tensor",
)
def _of_weights(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, mode: str) -> torch.Tensor:
    if not uses_triton(mode, rows, grad):
        return loop_weight(rows, grad, ends)
    out = rows.new_empty(len(ends), rows.shape[1], grad.shape[1])
    launch_weight((_rows(rows), _rows(grad)), ends.contiguous(), out)
    return out


@_of_weights.register_fake
def _(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor, mode: str) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def loop_weight(rows_RK: torch.Tensor, grad_RN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return the gradients of all matrices, ``[E, K, N]``, computed by torch."""
    ends = ends_E.tolist()
    out_EKN = rows_RK.new_empty(len(ends), rows_RK.shape[1], grad_RN.shape[1])
    for start, end, out_KN in zip([0, *ends[:-1]], ends, out_EKN.unbind(), strict=True):
        torch.mm(rows_RK[start:end].T, grad_RN[start:end], out=out_KN)
    return out_EKN


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _dense(weights: torch.Tensor) -> torch.Tensor:
    return weights if 1 in weights.stride()[1:] else weights.contiguous()


def launch(
    matrices: tuple[torch.Tensor, torch.Tensor], ends: torch.Tensor, out: torch.Tensor, config: Config | None = None
) -> None:
    """Write the products of rows and matrices to ``out``; without ``config`` the registry chooses the configuration."""
    from partool_kernels.grouped_gemm import kernel

    (a, b), device = matrices, out.device
    (rows, inner), (groups, _, columns) = a.shape, b.shape
    flags = ("nn" if b.stride(2) == 1 else "nt", *precision(a))
    shape = (("n", columns), ("k", inner), ("e", groups))
    config = config or choose(KernelCall("grouped_gemm", (a.dtype, out.dtype), shape, rows, flags), device).config
    blocks = config.constants
    # Each group may end within a tile, and so may the rows without a group.
    tiles = (-(-rows // blocks["BLOCK_M"]) + groups) * -(-columns // blocks["BLOCK_N"])
    options: dict[str, Any] = launch_options(config, device) | _options(a)
    options |= {"GROUPS": power_above(groups), "WHOLE": inner % blocks["BLOCK_K"] == 0}
    with on(device):
        kernel.grouped_gemm[tiles,](
            *(a, b, ends, out, rows, columns, inner, groups),
            *(a.stride(0), *b.stride(), out.stride(0)),
            **options,
        )


def launch_weight(
    matrices: tuple[torch.Tensor, torch.Tensor], ends: torch.Tensor, out: torch.Tensor, config: Config | None = None
) -> None:
    """Write the gradients of all matrices to ``out``; without ``config`` the registry chooses the configuration."""
    from partool_kernels.grouped_gemm import kernel

    (a, grad), device = matrices, out.device
    groups, inner, columns = out.shape
    shape = (("m", inner), ("n", columns), ("e", groups))
    call = KernelCall("grouped_gemm_weight", (a.dtype, out.dtype), shape, len(a), precision(a))
    config = config or choose(call, device).config
    blocks = config.constants
    tiles = groups * -(-inner // blocks["BLOCK_M"]) * -(-columns // blocks["BLOCK_N"])
    with on(device):
        kernel.grouped_gemm_weight[tiles,](
            *(a, grad, ends, out, inner, columns),
            *(a.stride(0), grad.stride(0), out.stride(0), out.stride(1)),
            **launch_options(config, device),
            **_options(a),
        )


def _options(a: torch.Tensor) -> dict[str, Any]:
    return {"PRECISION": "tf32" if precision(a) else "ieee", "UPCAST": interpreting()}


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weights, ends, ctx.mode = inputs
    ctx.save_for_backward(rows, weights, ends)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    rows, weights, ends = ctx.saved_tensors
    of_rows = torch.ops.partool.grouped_gemm(grad, weights.mT, ends, ctx.mode) if ctx.needs_input_grad[0] else None
    of_weights = None
    if ctx.needs_input_grad[1]:
        # The gradient of transposed matrices is transposed too: it has the same memory layout.
        turned = weights.stride(2) != 1
        pair = (grad, rows) if turned else (rows, grad)
        of_weights = torch.ops.partool.grouped_gemm_weight(*pair, ends, ctx.mode)
        of_weights = of_weights.mT if turned else of_weights
    return of_rows, of_weights, None, None


_grouped.register_autograd(_gradients, setup_context=_keep)


GROUPED: Any = torch.ops.partool.grouped_gemm.default
"""The operator of :func:`grouped_gemm`, for policies of recomputation."""

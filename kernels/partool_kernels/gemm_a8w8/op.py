"""Operator for the product ``a @ b.T`` of two matrices in 8 bits.

On GPUs a Triton kernel computes the product, and splits the sum where the result has few tiles. On other devices torch
converts the matrices to float32 and multiplies them.
"""

from __future__ import annotations

import torch

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton_8bit
from partool_kernels.fp8.formats import BLOCK, LARGEST, Quantised, blocks
from partool_kernels.registry import Config


def gemm_a8w8(a: Quantised, b: Quantised, dtype: torch.dtype, mode: str = "auto") -> torch.Tensor:
    """Return ``a @ b.T``, ``[M, N]`` in type ``dtype``.

    ``a [M, K]`` has a scale per 1 x 128, and ``b [N, K]`` has a scale per 1 x 128 or per 128 x 128. Equal inputs give
    equal bits in every run. ``mode`` is as in :func:`partool_kernels.device.uses_triton`. Raises ValueError where
    widths, types, devices or scales do not fit.
    """
    _check(a, b)
    out: torch.Tensor = torch.ops.partool.gemm_a8w8(a.q, a.scale, b.q, b.scale, dtype, mode)
    return out


def _check(a: Quantised, b: Quantised) -> None:
    if a.q.ndim != 2 or b.q.ndim != 2 or a.q.shape[1] != b.q.shape[1]:
        raise ValueError(f"matrices {list(a.q.shape)} and {list(b.q.shape)} have no common inner width")
    if a.q.dtype != b.q.dtype or a.q.dtype not in LARGEST or a.q.device != b.q.device:
        raise ValueError(
            f"matrices of {a.q.dtype} on {a.q.device} and {b.q.dtype} on {b.q.device} cannot be multiplied"
        )
    depth = blocks(a.q.shape[1])
    fitting = {"first": [(depth, len(a.q))], "second": [(depth, len(b.q)), (depth, blocks(len(b.q)))]}
    for name, given in (("first", a.scale), ("second", b.scale)):
        if tuple(given.shape) not in fitting[name] or given.dtype != torch.float32:
            words = " or ".join(map(str, map(list, fitting[name])))
            raise ValueError(f"scales of the {name} matrix are {list(given.shape)} {given.dtype}, not {words} float32")


@torch.library.custom_op(
    "partool::gemm_a8w8",
    mutates_args=(),
    schema="(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, ScalarType dtype, str mode) -> Tensor",
)
def _gemm(  # noqa: PLR0917 - the arguments of an operator
    a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, mode: str
) -> torch.Tensor:
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=dtype)
    if dtype == torch.float64 or not uses_triton_8bit(mode, a.dtype, a, b):
        return reference(Quantised(a, scale_a), Quantised(b, scale_b)).to(dtype)
    return launch(Quantised(_rows(a), scale_a.contiguous()), Quantised(_rows(b), scale_b.contiguous()), dtype)


@_gemm.register_fake
def _(  # noqa: PLR0917 - likewise
    a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, mode: str
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def reference(a: Quantised, b: Quantised) -> torch.Tensor:
    """Return ``a @ b.T`` in float32, computed by torch from the matrices converted to float32."""
    # Autocast is off, as it would round the dequantised numbers once more.
    with torch.autocast(a.q.device.type, enabled=False):
        return a.wide() @ b.wide().T


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return the matrix with contiguous columns; it is copied only where its columns are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def is_square(b: Quantised) -> bool:
    """Return whether scales are per 128 x 128; False for a single row, where both kinds of scales are equal."""
    return b.scale.shape[1] != len(b.q)


def launch(a: Quantised, b: Quantised, dtype: torch.dtype, config: Config | None = None) -> torch.Tensor:
    """Run the kernel and return ``a @ b.T``; without ``config`` the registry chooses the configuration."""
    from partool_kernels.gemm_a8w8 import kernel

    (rows, inner), columns, device = a.q.shape, len(b.q), a.q.device
    flags = () if is_square(b) else ("rows",)
    call = KernelCall("gemm_a8w8", (a.q.dtype, dtype), (("n", columns), ("k", inner)), rows, flags)
    config = config or choose(call, device).config
    constants = config.constants
    split = constants["SPLIT"]
    parts = torch.empty((split, rows, columns), dtype=torch.float32 if split > 1 else dtype, device=device)
    grid = (-(-rows // constants["BLOCK_M"]) * -(-columns // constants["BLOCK_N"]), split)
    with on(device):
        kernel.gemm_a8w8[grid](
            a.q, b.q, a.scale, b.scale, parts, rows, columns, inner,
            a.q.stride(0), b.q.stride(0), a.scale.stride(0), b.scale.stride(0), parts.stride(1), parts.stride(0),
            SQUARE=is_square(b), WHOLE=inner % BLOCK == 0, **launch_options(config, device),
        )  # fmt: skip
    # The parts are always added in the same order; atomic additions would give different results from run to run.
    return parts.view(rows, columns) if split == 1 else parts.sum(0).to(dtype)

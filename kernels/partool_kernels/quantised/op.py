"""Products with frozen matrices in 4 or 8 bits, which exist as numbers only while a product is computed.

Forward and backward passes make the numbers anew: between them, only codes and scales are kept. The matrix is frozen,
so there is no gradient for it. One operator computes both products, since compilers would keep the numbers of a
separate conversion for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.grouped_gemm.op import grouped_gemm
from partool_kernels.quantised import native
from partool_kernels.quantised.codes import NF4_BLOCK, PartPlace, reference, scales_of
from partool_kernels.registry import Config


class Stored(NamedTuple):
    """A rank's part of a frozen matrix ``[O, I]`` in few bits."""

    codes: torch.Tensor
    """nf4: uint8 ``[O, ceil(I / 2)]``; int8: ``[O, I]``."""
    absmax: torch.Tensor
    """``[O, ceil(I / 64)]``, for int8 ``[O, 1]``: scales in float32, or in 8 bits where they have scales themselves."""
    seconds: torch.Tensor
    """Scales of the whole matrix's scales, and their mean; no elements if ``absmax`` is in float32."""
    place: Sequence[int]
    """Where the part lies in the whole matrix (``PartPlace.flat``)."""


def dequantise(stored: Stored, dtype: torch.dtype, mode: str = "auto") -> torch.Tensor:
    """Return the matrix ``[O, I]``: products in float32, rounded to ``dtype``.

    ``mode`` is as in ``partool_kernels.device.uses_triton``.
    """
    place, codes = PartPlace.of_flat(stored.place), stored.codes
    scales = scales_of(stored.absmax, stored.seconds, place)
    native_takes, like = native.takes(mode, codes, dtype), scales.new_empty(1, dtype=dtype)
    by_triton = uses_triton(mode, like, codes)
    if not by_triton and not native_takes:
        return reference(codes, scales, place, dtype)
    out = codes.new_empty(len(codes), place.columns[1] - place.columns[0], dtype=dtype)
    (launch if by_triton else native.dequantise)(codes.contiguous(), scales.contiguous(), place, out)
    return out


def linear(x: torch.Tensor, stored: Stored, mode: str = "auto") -> torch.Tensor:
    """Return ``x [..., I]`` times the transpose of a stored matrix ``[O, I]``, ``[..., O]``."""
    out: torch.Tensor = torch.ops.partool.quantised_product(x, *stored, None, False, mode)
    return out


def grouped(rows_RI: torch.Tensor, stored: Stored, ends_E: torch.Tensor, mode: str = "auto") -> torch.Tensor:
    """Return each row times the transpose of its expert's matrix; the stored matrix is those of all experts, stacked.

    ``ends_E`` is as in ``grouped_gemm``.
    """
    out: torch.Tensor = torch.ops.partool.quantised_product(rows_RI, *stored, ends_E, False, mode)
    return out


@torch.library.custom_op(
    "partool::quantised_product",
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor absmax, Tensor seconds, int[] place, Tensor? ends, "
    "bool back, str mode) -> Tensor",
)
def _product(  # noqa: PLR0917 - operators have no keywords
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    seconds: torch.Tensor,
    place: Sequence[int],
    ends: torch.Tensor | None,
    back: bool,
    mode: str,
) -> torch.Tensor:
    matrix = dequantise(Stored(codes, absmax, seconds, place), x.dtype, mode)
    if ends is None:
        return x @ matrix if back else F.linear(x, matrix)
    matrices = matrix.view(len(ends), len(matrix) // len(ends), matrix.shape[1])
    return grouped_gemm(x.contiguous(), matrices if back else matrices.mT, ends, mode)


@_product.register_fake
def _(  # noqa: PLR0917 - as above
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    seconds: torch.Tensor,
    place: Sequence[int],
    ends: torch.Tensor | None,
    back: bool,
    mode: str,
) -> torch.Tensor:
    rows = codes.shape[0] if ends is None else codes.shape[0] // ends.shape[0]
    return x.new_empty(*x.shape[:-1], place[2] - place[1] if back else rows)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, absmax, seconds, ctx.place, ends, ctx.back, ctx.mode = inputs
    ctx.save_for_backward(codes, absmax, seconds, ends)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    codes, absmax, seconds, ends = ctx.saved_tensors
    of_x = torch.ops.partool.quantised_product(grad, codes, absmax, seconds, ctx.place, ends, not ctx.back, ctx.mode)
    return (of_x, *[None] * 7)


_product.register_autograd(_gradient, setup_context=_keep)


QUANTISED: Any = torch.ops.partool.quantised_product.default
"""The operator of products with stored matrices, for policies of recomputation."""


def launch(
    codes: torch.Tensor, scales: torch.Tensor, place: PartPlace, out: torch.Tensor, config: Config | None = None
) -> None:
    """Write the numbers of codes to ``out`` by Triton; without ``config`` the registry chooses the configuration.

    All tensors are contiguous.
    """
    from partool_kernels.quantised import kernel

    name = "dequantise_int8" if codes.dtype == torch.int8 else "dequantise_nf4"
    rows, columns = out.shape
    call = KernelCall(name, (out.dtype,), (("n", columns),), rows)
    config = config or choose(call, out.device).config
    grid = (rows, -(-columns // config.constants["BLOCK"]))
    skipped = place.columns[0] % NF4_BLOCK
    with on(out.device):
        getattr(kernel, name)[grid](codes, scales, out, columns, skipped, **launch_options(config, out.device))

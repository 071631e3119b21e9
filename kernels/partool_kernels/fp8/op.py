"""Operator that converts a matrix, its transpose or both to 8 bits with a scale per block.

On GPUs a Triton kernel reads the matrix from memory once; on other devices torch computes the same bits.
"""

from __future__ import annotations

import torch

from partool_kernels.device import KernelCall, choose, interpreting, launch_options, on, uses_triton_8bit
from partool_kernels.fp8.formats import BLOCK, LARGEST, Quantised, blocks, quantised
from partool_kernels.registry import Config

_LEAST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e4m3fnuz: 2.0**-10}
"""Smallest positive number of each type."""


def quantise(
    x: torch.Tensor, flags: str, dtype: torch.dtype = torch.float8_e4m3fn, mode: str = "auto"
) -> tuple[Quantised, Quantised]:
    """Return a matrix ``[M, K]`` and its transpose in 8 bits; a form that is not requested has no elements.

    ``flags`` are words separated by spaces: ``plain`` requests the matrix and ``turned`` requests its transpose, each
    with a scale per 1 x 128. With ``square`` scales are per 128 x 128; with ``power`` scales are powers of two. Blocks
    of zeros have the scale 1; blocks with an infinity or a NaN have the scale NaN. The operator has no gradient.
    ``mode`` is as in :func:`partool_kernels.device.uses_triton`. Raises ValueError for any other shape, type or flag.
    """
    _check(x, flags, dtype)
    q, scale, q_turned, scale_turned = torch.ops.partool.fp8_quantise(x.detach(), flags, dtype, mode)
    return Quantised(q, scale), Quantised(q_turned, scale_turned)


def _check(x: torch.Tensor, flags: str, dtype: torch.dtype) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"a matrix of floating point numbers is made narrow, not {list(x.shape)} {x.dtype}")
    if dtype not in LARGEST:
        raise ValueError(f"no 8-bit type {dtype}; there are {', '.join(map(str, LARGEST))}")
    if unknown := set(flags.split()) - {"plain", "turned", "square", "power"}:
        raise ValueError(f"no flag {', '.join(sorted(unknown))}")


@torch.library.custom_op(
    "partool::fp8_quantise",
    mutates_args=(),
    schema="(Tensor x, str flags, ScalarType dtype, str mode) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _quantise(
    x: torch.Tensor, flags: str, dtype: torch.dtype, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = _empty(x, flags, dtype)
    asked = set(flags.split())
    if uses_triton_8bit(mode, dtype, x):
        launch(x if x.stride(1) == 1 else x.contiguous(), made, asked)
        return made
    empty = Quantised(x.new_empty(0, 0, dtype=dtype), x.new_empty(0, 0, dtype=torch.float32))
    wanted = [("plain", x), ("turned", x.T)]
    square, power = "square" in asked, "power" in asked
    results = [quantised(y, dtype, square=square, power_of_two=power) if n in asked else empty for n, y in wanted]
    return results[0].q, results[0].scale, results[1].q, results[1].scale


def _empty(
    x: torch.Tensor, flags: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    asked = set(flags.split())
    made: list[torch.Tensor] = []
    for name, (rows, columns) in (("plain", x.shape), ("turned", x.shape[::-1])):
        scales = (blocks(columns), blocks(rows) if "square" in asked else rows)
        made.append(x.new_empty((rows, columns) if name in asked else (0, 0), dtype=dtype))
        made.append(x.new_empty(scales if name in asked else (0, 0), dtype=torch.float32))
    return made[0], made[1], made[2], made[3]


@_quantise.register_fake
def _(
    x: torch.Tensor, flags: str, dtype: torch.dtype, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(x, flags, dtype)


def launch(x: torch.Tensor, made: tuple[torch.Tensor, ...], flags: set[str], config: Config | None = None) -> None:
    """Run the kernel on a matrix, whose rows may be strided.

    Without ``config`` the registry chooses the configuration.
    """
    from partool_kernels.fp8 import kernel

    rows, columns = x.shape
    dtype = made[0].dtype
    call = KernelCall("fp8_quantise", (x.dtype, dtype), (("k", columns),), rows, tuple(sorted(flags)))
    config = config or choose(call, x.device).config
    strides = tuple(each.stride(0) for each in (x, *made))
    grid = (_programs(rows, columns, flags, config),)
    with on(x.device):
        kernel.fp8_quantise[grid](
            x, *made, rows, columns, blocks(columns), *strides,
            SQUARE="square" in flags, PLAIN="plain" in flags, TURNED="turned" in flags, POWER="power" in flags,
            LARGEST=LARGEST[dtype], LEAST=_LEAST[dtype] if interpreting() else 0.0,
            **launch_options(config, x.device),
        )  # fmt: skip


def _programs(rows: int, columns: int, flags: set[str], config: Config) -> int:
    """Return the number of programs; without ``square``, tiles of 128 x 128 with a transpose have several programs."""
    high, wide = config.constants["ROWS"], config.constants["COLUMNS"]
    if "turned" not in flags or "square" in flags:
        return -(-rows // high) * blocks(columns)
    parts = BLOCK // wide + (BLOCK // high if "plain" in flags else 0)
    return blocks(rows) * blocks(columns) * parts


assert BLOCK == 128  # the kernel's block size

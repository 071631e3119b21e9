"""Description, for the registry, of the kernel that converts numbers to 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.architectures import ARCHITECTURES
from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

LARGEST = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0}
"""Largest number of each 8-bit type: OCP's type ("OCP 8-bit Floating Point Specification") and AMD's older type
(gfx942)."""
FLAGS = ("plain", "power", "square", "turned")
"""``plain`` writes the matrix, and ``turned`` writes its transpose. With ``square`` each block of 128 x 128 has a
scale; with ``power`` scales are powers of two."""


def _configs(request: Request) -> Iterator[Config]:
    whole = {"turned", "square"} & set(request.flags)
    for rows in (128,) if whole else (8, 16, 32, 64, 128):
        for warps in (4, 8, 16):
            if 8 <= rows * 128 // (warps * ARCHITECTURES[request.architecture].lanes) <= 128:
                yield Config((("ROWS", rows),), num_warps=warps, num_stages=1)


def _default(request: Request) -> Config:
    if not {"turned", "square"} & set(request.flags):
        return Config((("ROWS", 32),), num_warps=4, num_stages=1)
    # To write the matrix and its transpose at once takes twice the registers, hence more threads.
    both = {"plain", "turned"} <= set(request.flags)
    return Config((("ROWS", 128),), num_warps=16 if both and "square" not in request.flags else 8, num_stages=1)


def _signature(request: Request, config: Config) -> Signature:
    wide, narrow = (TRITON_TYPE[dtype] for dtype in request.dtypes)
    strides = ("x_stride", "q_stride", "scale_stride", "q_turned_stride", "scale_turned_stride")
    flags = {name: name.lower() in request.flags for name in ("SQUARE", "PLAIN", "TURNED", "POWER")}
    constants = {**flags, "LARGEST": LARGEST[request.dtypes[1]], "LEAST": 0.0, **config.constants}
    return Signature(
        {"x": f"*{wide}", "q": f"*{narrow}", "scale": "*fp32", "q_turned": f"*{narrow}", "scale_turned": "*fp32"}
        | {"rows": "i64", "columns": "i64", "column_tiles": "i32"}
        | dict.fromkeys(strides, "i64")
        | dict.fromkeys(constants, "constexpr"),
        constants,
        divisible=("rows", "columns", *strides) if request.rows % 16 == 0 and request.width["k"] % 16 == 0 else (),
    )


def _examples(architecture: str) -> Iterator[Request]:
    narrow = ARCHITECTURES[architecture].fp8
    if narrow is None:
        return
    for rows, width in ((16384, 4096), (16384, 14336)):
        for flags in (("plain",), ("turned",), ("plain", "turned")):
            yield Request("fp8_quantise", architecture, ("bfloat16", narrow), (("k", width),), rows, flags)
    for flags in (("plain", "square"), ("square", "turned")):
        yield Request("fp8_quantise", architecture, ("bfloat16", narrow), (("k", 4096),), 14336, flags)


def _moved_bytes(request: Request) -> float:
    copies = len({"plain", "turned"} & set(request.flags))
    return request.rows * request.width["k"] * (bytes_of(request.dtypes[0]) + copies * (1 + 4 / 128))


KERNELS = (
    Kernel(
        name="fp8_quantise",
        source="fp8/kernel.py",
        function="fp8_quantise",
        widths=("k",),
        configs=_configs,
        default=_default,
        # The transpose is made in shared memory, one byte per number.
        shared_bytes=lambda request, config: config.constants["ROWS"] * 128 if "turned" in request.flags else 0,
        # A scale over 128 rows must be computed by one program; without such scales a tile may have any number of rows.
        legal=lambda request, config: config.constants["ROWS"] == 128 or not {"turned", "square"} & set(request.flags),
        signature=_signature,
        examples=_examples,
        moved_bytes=_moved_bytes,
        reference="scale = x.view(m, k // 128, 128).abs().amax(-1) / 448; (x / scale).to(torch.float8_e4m3fn)",
    ),
)

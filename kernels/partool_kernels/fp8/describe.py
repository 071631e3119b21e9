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
    plain, turned, square = (name in request.flags for name in ("plain", "turned", "square"))
    sizes = (8, 16, 32, 64, 128)
    for rows in sizes if plain and not square else (128,):
        for columns in sizes[1:] if turned and not square else (128,):
            for warps in (4, 8, 16):
                lanes = warps * ARCHITECTURES[request.architecture].lanes
                numbers = [rows * 128] * (plain or square) + [columns * 128] * (turned and not square)
                if all(8 <= number // lanes <= 128 for number in numbers):
                    yield _config(rows, columns, warps)


def _default(request: Request) -> Config:
    # The kernel is bound by memory: blocks need few enough registers that several share a processor, of which one reads
    # while another writes.
    if "square" in request.flags:
        return _config(128, 128, 8 if "turned" in request.flags else 16)
    if "turned" not in request.flags:
        return _config(32, 128, 4)
    # AMD's caches are read in lines of 128 bytes, NVIDIA's in halves of these.
    columns = 64 if ARCHITECTURES[request.architecture].backend == "hip" else 32
    return _config(columns if "plain" in request.flags else 128, columns, 8)


def _config(rows: int, columns: int, warps: int) -> Config:
    return Config((("ROWS", rows), ("COLUMNS", columns)), num_warps=warps, num_stages=1)


def _legal(request: Request, config: Config) -> bool:
    """Return whether one program computes each scale, and each number of a form is converted by one program.

    A scale over 128 rows or columns must be computed by one program. Programs of a transpose share a tile of 128 x 128.
    """
    rows, columns = config.constants["ROWS"], config.constants["COLUMNS"]
    plain, turned, square = (name in request.flags for name in ("plain", "turned", "square"))
    return (
        (rows == 128 or (plain and not square))
        and (columns == 128 or (turned and not square))
        and (rows <= 128 or not turned)
        and columns <= 128
    )


def _shared_bytes(request: Request, config: Config) -> int:
    # The transpose is made in shared memory: of 8-bit numbers, or of a half-precision tile whose scale is known.
    if "turned" not in request.flags:
        return 0
    return config.constants["COLUMNS"] * 128 * (2 if "square" in request.flags else 1)


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
        shared_bytes=_shared_bytes,
        legal=_legal,
        signature=_signature,
        examples=_examples,
        moved_bytes=_moved_bytes,
        reference="scale = x.view(m, k // 128, 128).abs().amax(-1) / 448; (x / scale).to(torch.float8_e4m3fn)",
    ),
)

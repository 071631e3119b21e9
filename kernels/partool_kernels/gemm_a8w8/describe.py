"""Description, for the registry, of the kernel that multiplies 8-bit matrices."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.architectures import ARCHITECTURES
from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

_DEPTH = 128
"""Number of elements of the inner width that are multiplied at a time; these elements share a scale."""
_TILES = ((16, 128), (32, 128), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))


def _configs(request: Request) -> Iterator[Config]:
    amd = ARCHITECTURES[request.architecture].backend == "hip"
    for block_m, block_n in _TILES:
        if block_m >= 64 and block_m > 2 * request.rows:
            continue
        for split in (1, 2, 4, 8):
            if split > 1 and (split > -(-request.width["k"] // _DEPTH) // 4 or not _few(request, block_m, block_n)):
                continue
            for warps in (4, 8):
                for stages in (2, 3) if amd else (3, 4, 5):
                    for kind in (16, 32) if amd else (0,):
                        yield _config((block_m, block_n), split, (warps, stages, kind))


def _config(tile: tuple[int, int], split: int, how: tuple[int, int, int]) -> Config:
    blocks = (("BLOCK_M", tile[0]), ("BLOCK_N", tile[1]), ("GROUP_M", 8), ("SPLIT", split))
    warps, stages, kind = how
    return Config(blocks, num_warps=warps, num_stages=stages, matrix_instr_nonkdim=kind)


def _few(request: Request, block_m: int, block_n: int) -> bool:
    """Return whether there are fewer than two tiles per multiprocessor (compute unit); if so, a split may be faster."""
    return -(-request.rows // block_m) * -(-request.width["n"] // block_n) < 2 * (request.units or 132)


def _default(request: Request) -> Config:
    amd = ARCHITECTURES[request.architecture].backend == "hip"
    tile = (128, 128) if request.rows > 64 else (64, 128) if request.rows > 32 else (32, 128)
    if "rows" in request.flags and request.architecture == "sm_100":
        # Two vectors of scales and a larger tile together do not fit the registers.
        tile = (min(tile[0], 64), 128)
    tiles = -(-request.rows // tile[0]) * -(-request.width["n"] // tile[1])
    split, blocks = 1, -(-request.width["k"] // _DEPTH)
    while tiles * split * 2 <= (request.units or 132) and split < 8 and blocks >= 8 * split:
        split *= 2
    if amd:
        return _config(tile, split, (8 if tile[0] == 128 else 4, 2, 16))
    return _config(tile, split, (8 if tile[0] == 128 or "rows" in request.flags else 4, 3, 0))


def _shared_bytes(request: Request, config: Config) -> int:
    blocks = config.constants
    # On gfx942 one of the stages is kept in registers.
    stages = config.num_stages - (request.architecture == "gfx942")
    return max(stages, 1) * (blocks["BLOCK_M"] + blocks["BLOCK_N"]) * _DEPTH


def _signature(request: Request, config: Config) -> Signature:
    narrow, out = (TRITON_TYPE[dtype] for dtype in request.dtypes)
    # Parts of a split sum are written in float32 and added afterwards.
    out = "fp32" if config.constants["SPLIT"] > 1 else out
    strides = ("a_stride", "b_stride", "scale_a_stride", "scale_b_stride", "out_stride", "part_stride")
    constants = {
        "SQUARE": "rows" not in request.flags,
        "WHOLE": request.width["k"] % _DEPTH == 0,
        **config.constants,
    }
    return Signature(
        {"a": f"*{narrow}", "b": f"*{narrow}", "scale_a": "*fp32", "scale_b": "*fp32", "out": f"*{out}"}
        | dict.fromkeys(("rows", "columns", "inner"), "i32")
        | dict.fromkeys(strides, "i64")
        | dict.fromkeys(constants, "constexpr"),
        constants,
        divisible=_divisible(request),
    )


def _divisible(request: Request) -> tuple[str, ...]:
    widths = {"rows": request.rows, "columns": request.width["n"], "inner": request.width["k"]}
    divisible = [name for name, width in widths.items() if width % 16 == 0]
    strides = {"inner": ("a_stride", "b_stride"), "rows": ("scale_a_stride",), "columns": ("out_stride", "part_stride")}
    return (*divisible, *(stride for name in divisible for stride in strides[name]))


def _examples(architecture: str) -> Iterator[Request]:
    narrow = ARCHITECTURES[architecture].fp8
    if narrow is None:
        return
    types = (narrow, "bfloat16")
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)):
        for rows in (64, 16384):
            yield Request("gemm_a8w8", architecture, types, (("n", n), ("k", k)), rows)
        # This is the gradient of a weight: its inner width is the number of tokens.
        yield Request("gemm_a8w8", architecture, types, (("n", k), ("k", 16384)), n, ("rows",))


def _moved_bytes(request: Request) -> float:
    m, n, k = request.rows, request.width["n"], request.width["k"]
    return (m + n) * k + m * n * bytes_of(request.dtypes[1])


KERNELS = (
    Kernel(
        name="gemm_a8w8",
        source="gemm_a8w8/kernel.py",
        function="gemm_a8w8",
        widths=("n", "k"),
        configs=_configs,
        default=_default,
        shared_bytes=_shared_bytes,
        signature=_signature,
        examples=_examples,
        moved_bytes=_moved_bytes,
        flops=lambda request: 2.0 * request.rows * request.width["n"] * request.width["k"],
        matrix=True,
        reference="(dequantised a) @ (dequantised b).T in bfloat16",
    ),
)

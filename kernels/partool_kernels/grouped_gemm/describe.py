"""Descriptions of the kernels for products of groups of rows, for the registry."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.gemm.describe import is_amd, precision_of, shared_bytes
from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

_TILES = ((16, 128), (32, 128), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256))


def power_above(groups: int) -> int:
    """Return the least power of two above ``groups``: the rows without a group count as one more group."""
    return 1 << groups.bit_length()


def _config(tile: tuple[int, int, int], how: tuple[int, int, int], *, amd: bool) -> Config:
    warps, stages, rows = how
    blocks = tuple(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    return Config(blocks, num_warps=warps, num_stages=stages, matrix_instr_nonkdim=rows if amd else 0)


def _configs(request: Request) -> Iterator[Config]:
    amd = is_amd(request)
    for block_m, block_n in _TILES:
        for block_k in (32, 64) if bytes_of(request.dtypes[0]) == 2 else (16, 32):
            for warps in (4, 8):
                for stages in (1, 2) if amd else (2, 3, 4):
                    for rows in (16, 32) if amd and block_m >= 32 else (16,):
                        yield _config((block_m, block_n, block_k), (warps, stages, rows), amd=amd)


def _default(request: Request) -> Config:
    amd = is_amd(request)
    if bytes_of(request.dtypes[0]) == 4:
        return _config((64, 64, 32), (8, 2 if amd else 3, 16), amd=amd)
    # The tile's height follows the mean size of a group: a group with few rows wastes most of a tall tile.
    mean = request.rows // request.width["e"]
    tall = 128 if request.kernel == "grouped_gemm_weight" or mean >= 128 else 64 if mean >= 64 else 32
    return _config(
        (tall, 128, 64 if tall < 128 or not amd else 32), (8 if tall == 128 else 4, 2 if amd else 3, 16), amd=amd
    )


def _forward(request: Request, config: Config) -> Signature:
    blocks, turned = config.constants, "nt" in request.flags
    constants: dict[str, object] = {
        ("b_row" if turned else "b_column"): 1,
        **blocks,
        "GROUPS": power_above(request.width["e"]),
        "WHOLE": request.width["k"] % blocks["BLOCK_K"] == 0,
        "PRECISION": precision_of(request),
        "UPCAST": False,
    }
    strides = ("a_stride", "b_group", "b_row", "b_column", "out_stride")
    even = {"columns": request.width["n"] % 16 == 0, "inner": request.width["k"] % 16 == 0}
    aligned = [name for name, is_even in even.items() if is_even]
    if even["inner"]:
        aligned += ["a_stride", *(["b_column"] if turned else [])]
    if even["columns"]:
        aligned += ["out_stride", *([] if turned else ["b_row"])]
    if any(even.values()):
        aligned.append("b_group")
    return _signature(request, ("b", "rows columns inner groups", strides), constants, aligned)


def _weight(request: Request, config: Config) -> Signature:
    constants: dict[str, object] = {**config.constants, "PRECISION": precision_of(request), "UPCAST": False}
    strides = ("a_stride", "grad_stride", "out_group", "out_stride")
    even = {"inner": request.width["m"] % 16 == 0, "columns": request.width["n"] % 16 == 0}
    aligned = [name for name, is_even in even.items() if is_even]
    aligned += ["a_stride"] if even["inner"] else []
    aligned += ["grad_stride", "out_stride", "out_group"] if even["columns"] else []
    return _signature(request, ("grad", "inner columns", strides), constants, aligned)


def _signature(
    request: Request, names: tuple[str, str, tuple[str, ...]], constants: dict[str, object], aligned: list[str]
) -> Signature:
    """Return a kernel's signature; ``names`` holds the names of the second matrix, of the sizes and of the strides."""
    narrow, out = (f"*{TRITON_TYPE[dtype]}" for dtype in request.dtypes)
    second, numbers, strides = names
    arguments = {"a": narrow, second: narrow, "ends": "*i64", "out": out}
    arguments |= dict.fromkeys(numbers.split(), "i32") | dict.fromkeys(strides, "i64")
    return Signature(arguments | dict.fromkeys(constants, "constexpr"), constants, tuple(aligned))


def _examples(architecture: str) -> Iterator[Request]:
    for experts, rows in ((8, 16384), (256, 65536)):
        for n, k in ((2048, 7168), (7168, 2048)):
            shape = (("n", n), ("k", k), ("e", experts))
            yield Request("grouped_gemm", architecture, ("bfloat16",) * 2, shape, rows, ("nt",))
    yield Request("grouped_gemm", architecture, ("bfloat16",) * 2, (("n", 2048), ("k", 7168), ("e", 8)), 16384, ("nn",))


def _weight_examples(architecture: str) -> Iterator[Request]:
    shape = (("m", 7168), ("n", 2048), ("e", 8))
    yield Request("grouped_gemm_weight", architecture, ("bfloat16",) * 2, shape, 16384)


def _moved(request: Request, one: str, other: str) -> float:
    width = request.width
    elements = request.rows * (width[one] + width[other]) + width["e"] * width[one] * width[other]
    return elements * bytes_of(request.dtypes[0])


KERNELS = (
    Kernel(
        name="grouped_gemm",
        source="grouped_gemm/kernel.py",
        function="grouped_gemm",
        widths=("n", "k", "e"),
        configs=_configs,
        default=_default,
        shared_bytes=shared_bytes,
        signature=_forward,
        examples=_examples,
        moved_bytes=lambda request: _moved(request, "n", "k"),
        flops=lambda request: 2.0 * request.rows * request.width["n"] * request.width["k"],
        matrix=True,
        reference="F.grouped_mm(rows, weights, offs=ends)",
    ),
    Kernel(
        name="grouped_gemm_weight",
        source="grouped_gemm/kernel.py",
        function="grouped_gemm_weight",
        widths=("m", "n", "e"),
        configs=_configs,
        default=_default,
        shared_bytes=shared_bytes,
        signature=_weight,
        examples=_weight_examples,
        moved_bytes=lambda request: _moved(request, "m", "n"),
        flops=lambda request: 2.0 * request.rows * request.width["m"] * request.width["n"],
        matrix=True,
        reference="F.grouped_mm(rows.T, grad, offs=ends)",
    ),
)
"""A request's types are the inputs' type and the result's type; ``rows`` counts the rows of all groups. A flag of
``grouped_gemm`` is ``nt`` where matrices are stored as ``[E, N, K]``, otherwise ``nn``; ``tf32`` is optional."""

"""Shapes, configurations and compiler arguments of the kernels for norms, for the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

KINDS = ("layer", "rms")
"""Flags for LayerNorm and RMSNorm. Other flags: ``add`` adds the residual before the norm; ``bias`` adds a bias."""
_Tile = tuple[int, int, int]
"""Numbers of rows and columns of a tile, and number of warps that work on the tile."""
_UNITS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304, "gfx950": 256}
"""Number of multiprocessors or compute units of each architecture's usual device, for requests without this number."""
_PARTS_PER_UNIT = 2
_WIDEST = 8192
"""Maximum number of columns that a program of a backward pass holds in registers."""


def one_block(columns: int, config: Config) -> bool:
    """Return whether a block holds a whole row."""
    return columns <= config.constants["BLOCK"]


def _power(columns: int) -> int:
    return 1 << max(columns - 1, 0).bit_length()


def _tile(columns: int, widest: int) -> _Tile:
    """Return a tile of whole rows with at least 2048 elements, and warps for 16 elements per thread (at most 16 warps).

    A warp has 32 threads. Rows of more than ``widest`` columns are processed in blocks of ``widest`` columns.
    """
    block = min(max(_power(columns), 16), widest)
    rows = max(1, 2048 // block)
    return rows, block, min(rows * block // 512, 16)


def _warps(warps: int, architecture: str) -> int:
    """Return the number of warps that have ``warps * 32`` threads in all; on AMD a warp has 64 threads."""
    return max(warps // 2, 1) if architecture.startswith("gfx") else warps


def _forward_default(request: Request) -> Config:
    # Some compilers do not find enough registers for rows of 64 KiB.
    rows, block, warps = _tile(request.width["n"], 2 * _WIDEST if bytes_of(request.dtypes[0]) == 2 else _WIDEST)
    return Config((("ROWS", rows), ("BLOCK", block)), num_warps=_warps(warps, request.architecture), num_stages=1)


def _backward_default(request: Request) -> Config:
    # AMD's registers hold rows of twice that width, unless there is a bias, which needs a second sum.
    roomy = request.architecture.startswith("gfx") and "rms" in request.flags
    rows, block, warps = _tile(request.width["n"], 2 * _WIDEST if roomy else _WIDEST)
    # Narrow rows get half as many elements per thread: more took too many registers when compiled.
    tile = max(rows // 2, 1), block, _warps(warps, request.architecture)
    # NVIDIA copies to shared memory without registers, so the next row is loaded while this row's sums complete.
    return _in_parts(request, tile, stages=1 if request.architecture.startswith("gfx") else 2)


def _weights_default(request: Request) -> Config:
    return _in_parts(request, (8, 512, _warps(8, request.architecture)))


def _in_parts(request: Request, tile: _Tile, stages: int = 1, per_unit: int = _PARTS_PER_UNIT) -> Config:
    rows, block, warps = tile
    parts = per_unit * (request.units or _UNITS[request.architecture])
    blocks = (("ROWS", rows), ("BLOCK", block), ("PARTS", parts), ("STAGES", stages))
    return Config(blocks, num_warps=warps, num_stages=1)


def _forward_configs(request: Request) -> Iterator[Config]:
    for rows, block, warps in _tiles(request, 16384):
        yield Config((("ROWS", rows), ("BLOCK", block)), num_warps=warps, num_stages=1)


def _backward_configs(request: Request) -> Iterator[Config]:
    for tile in _tiles(request, 2 * _WIDEST):
        for stages in (1, 2):
            for per_unit in (1, 2, 4):
                yield _in_parts(request, tile, stages, per_unit)


def _weights_configs(request: Request) -> Iterator[Config]:
    for rows, block in ((4, 512), (8, 512), (16, 256), (16, 512), (4, 1024)):
        for warps in (4, 8):
            for per_unit in (1, 2):
                yield _in_parts(request, (rows, block, warps), 1, per_unit)


def _tiles(request: Request, widest: int) -> Iterator[_Tile]:
    """Yield tiles to measure, with 4 to 32 elements per thread.

    Tiles hold whole rows of up to ``widest`` columns; for rows of more than 8192 columns there are also smaller blocks.
    """
    columns, lanes = request.width["n"], 64 if request.architecture.startswith("gfx") else 32
    row_block = min(max(_power(columns), 16), widest)
    for block in sorted({row_block, min(row_block, 4096)} if columns > 8192 else {row_block}):
        for rows in (1, 2, 4, 8, 16, 32):
            for warps in (1, 2, 4, 8, 16):
                if 4 <= rows * block // (warps * lanes) <= 32 and (rows == 1 or rows * block <= 8192):
                    yield rows, block, warps


def _shared(request: Request, config: Config) -> int:
    """Return an upper bound of the shared memory in bytes, taken from the compiler's reports.

    Sums exchange data through shared memory, and loops may load the next rows into shared memory.
    """
    constants, size = config.constants, bytes_of(request.dtypes[0])
    rows, block, ahead = constants["ROWS"], constants["BLOCK"], constants.get("STAGES", 1) - 1
    matrices = 3 if "add" in request.flags else 2
    exchanged = (4 if rows > 1 else 2) * rows * block
    return exchanged + ahead * size * (matrices * rows * block + block) + 256 * config.num_warps


POINTERS = {
    "norm_forward": ("x", "residual", "weight", "bias", "total", "out", "mean", "rstd"),
    "norm_backward": ("grad", "grad_total", "x", "weight", "mean", "rstd", "grad_x", "of_weight", "of_bias"),
    "norm_weights": ("grad", "x", "mean", "rstd", "of_weight", "of_bias"),
}
"""Names of each kernel's tensor arguments."""
STRIDES = {
    "norm_forward": ("x", "residual", "total", "out"),
    "norm_backward": ("grad", "grad_total", "x", "grad_x"),
    "norm_weights": ("grad", "x"),
}
"""Names of each kernel's matrix arguments. The matrices have equal shapes, and their rows may be strided."""
_WIDE = ("mean", "rstd", "of_weight", "of_bias")
_DERIVED = {
    "norm_forward": ("LAYER", "ADD", "BIAS", "ONE"),
    "norm_backward": ("LAYER", "ADD", "BIAS", "ONE"),
    "norm_weights": ("LAYER", "BIAS"),
}


def derived_constants(name: str, flags: tuple[str, ...], columns: int, config: Config) -> dict[str, bool]:
    """Return those constants of a kernel that the flags, the width and the block size determine."""
    constants = {
        "LAYER": "layer" in flags, "ADD": "add" in flags, "BIAS": "bias" in flags, "ONE": one_block(columns, config)
    }  # fmt: skip
    return {constant: constants[constant] for constant in _DERIVED[name]}


def _signature(request: Request, config: Config) -> Signature:
    name, type_ = request.kernel, TRITON_TYPE[request.dtypes[0]]
    strides = tuple(f"{each}_stride" for each in STRIDES[name])
    constants: dict[str, object] = {
        **derived_constants(name, request.flags, request.width["n"], config),
        **config.constants,
    }
    return Signature(
        {pointer: "*fp32" if pointer in _WIDE else f"*{type_}" for pointer in POINTERS[name]}
        | dict.fromkeys(strides, "i64")
        | {"rows": "i32", "columns": "i32"}
        | ({"eps": "fp32"} if name == "norm_forward" else {})
        | dict.fromkeys(constants, "constexpr"),
        constants,
        divisible=(*strides, *(("columns",) if request.width["n"] % 16 == 0 else ())),
    )


_EXAMPLES: tuple[tuple[int, tuple[str, ...]], ...] = (
    (4096, ("rms",)),
    (4096, ("add", "rms")),
    (4096, ("bias", "layer")),
    (4096, ("add", "bias", "layer")),
    (128, ("rms",)),
    (2048, ("add", "rms")),
    (8192, ("rms",)),
    (8192, ("add", "rms")),
    (16384, ("add", "rms")),
    (65536, ("add", "rms")),
)
"""Widths and flags of typical requests: hidden sizes, head dimensions, and a width that no block can hold."""
_EXAMPLES_OF_WEIGHTS = ((16384, ("rms",)), (16384, ("bias", "layer")), (65536, ("rms",)))


def _examples(name: str) -> Callable[[str], Iterator[Request]]:
    def examples(architecture: str) -> Iterator[Request]:
        for width, flags in _EXAMPLES_OF_WEIGHTS if name == "norm_weights" else _EXAMPLES:
            yield Request(name, architecture, ("bfloat16",), (("n", width),), 16384, flags)

    return examples


def _moved(request: Request) -> float:
    """Return the bytes of matrices that a call moves; a row counts once, as repeated reads come from a cache."""
    added = "add" in request.flags
    passes = {"norm_forward": 4 if added else 2, "norm_backward": 4 if added else 3, "norm_weights": 2}
    return float(passes[request.kernel]) * request.rows * request.width["n"] * bytes_of(request.dtypes[0])


def _kernel(name: str, configs: Callable[[Request], Iterator[Config]], default: Callable[[Request], Config]) -> Kernel:
    return Kernel(
        name=name,
        source="norm/kernel.py",
        function=name,
        widths=("n",),
        configs=configs,
        default=default,
        shared_bytes=_shared,
        signature=_signature,
        examples=_examples(name),
        moved_bytes=_moved,
        reference="F.rms_norm(x + residual, ...)" if name == "norm_forward" else "its backward pass",
    )


KERNELS = (
    _kernel("norm_forward", _forward_configs, _forward_default),
    _kernel("norm_backward", _backward_configs, _backward_default),
    _kernel("norm_weights", _weights_configs, _weights_default),
)

"""Descriptions of the kernels for products of matrices, for the registry."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.architectures import ARCHITECTURES
from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

FORMS = ("nn", "nt", "tn", "tt")
"""Memory layouts of A and B: n is row-major, t is column-major. In a forward pass B is column-major."""
UNITS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304, "gfx950": 256}
"""Number of multiprocessors or compute units of each architecture's largest device; used if a request has none."""

_TILES = ((16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128))


def is_amd(request: Request) -> bool:
    """Return whether the request is for an architecture of AMD."""
    return ARCHITECTURES[request.architecture].backend == "hip"


def config_of(tile: tuple[int, int, int], split: int, warps: int, stages: int, *, amd: bool, rows: int = 16) -> Config:
    """Return a configuration; ``rows``, used only for AMD, is the number of rows of a matrix instruction."""
    blocks = tuple(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    return Config(
        (*blocks, ("GROUP_M", 8), ("SPLIT", split)),
        num_warps=warps,
        num_stages=stages,
        matrix_instr_nonkdim=rows if amd else 0,
    )


def shared_bytes(request: Request, config: Config) -> int:
    """Return the estimated bytes of shared memory for the tiles of A and B in all stages of a product."""
    blocks, wide = config.constants, bytes_of(request.dtypes[0])
    # On gfx942 one of the stages is kept in registers.
    stages = max(config.num_stages - (request.architecture == "gfx942"), 1)
    tiles = stages * (blocks["BLOCK_M"] + blocks["BLOCK_N"]) * blocks["BLOCK_K"] * wide
    # On gfx950 rows are padded against bank conflicts; on sm_100 shared memory also holds a barrier per stage.
    return tiles * 17 // 16 if request.architecture == "gfx950" else tiles + 16 * (request.architecture == "sm_100")


def _tiles(request: Request, block_m: int, block_n: int) -> int:
    return -(-request.rows // block_m) * -(-request.width["n"] // block_n)


def _configs(request: Request) -> Iterator[Config]:
    amd, wide = is_amd(request), bytes_of(request.dtypes[0])
    units = request.units or UNITS[request.architecture]
    for block_m, block_n in _TILES:
        if block_m > max(16, 2 * request.rows):
            continue
        for block_k in (32, 64, 128) if wide == 2 else (16, 32):
            for split in (1, 2, 4, 8):
                parts = -(-request.width["k"] // block_k) // split
                if split > 1 and (parts < 4 or _tiles(request, block_m, block_n) * split > 4 * units):
                    continue
                for warps in (4, 8):
                    for stages in (1, 2) if amd else (3, 4):
                        for rows in (16, 32) if amd and block_m >= 32 else (16,):
                            yield config_of((block_m, block_n, block_k), split, warps, stages, amd=amd, rows=rows)


def tile_for(request: Request) -> tuple[int, int, int]:
    """Return the tile (M, N, K) that the kernel's rule chooses.

    The tile's height M is as small as the rows allow. Tiles for float32 are smaller, to fit the registers.
    """
    if bytes_of(request.dtypes[0]) == 4:
        return (16 if request.rows <= 16 else 64, 64, 32)
    small = next((size for size in (16, 32, 64) if request.rows <= size), 128)
    return (small, 128, 64)


def _default(request: Request) -> Config:
    amd, tile = is_amd(request), tile_for(request)
    tiles, steps = _tiles(request, *tile[:2]), -(-request.width["k"] // tile[2])
    split = 1
    # Double the parts while each unit still gets at most one of them and every part keeps at least four steps.
    while tiles * split * 2 <= (request.units or UNITS[request.architecture]) and split < 8 and steps >= 8 * split:
        split *= 2
    # NVIDIA multiplies float32 outside of matrix units, from registers; four warps have too few registers.
    many = tile[0] * tile[1] >= 128 * 128 or bytes_of(request.dtypes[0]) == 4
    return config_of(tile, split, 8 if many else 4, 2 if amd else 3, amd=amd)


def strides_of(form: str) -> dict[str, object]:
    """Return a dictionary from names of strides to 1; it holds the strides of A and B that are 1 in layout ``form``."""
    ones = ("a_column" if form[0] == "n" else "a_row", "b_column" if form[1] == "n" else "b_row")
    return dict.fromkeys(ones, 1)


def precision_of(request: Request) -> str:
    """Return Triton's name of the precision in which float32 is multiplied: full, or TF32 with the flag ``tf32``."""
    return "tf32" if "tf32" in request.flags else "ieee"


def _signature(request: Request, config: Config) -> Signature:
    narrow, out = (TRITON_TYPE[dtype] for dtype in request.dtypes)
    blocks = config.constants
    out = "fp32" if blocks["SPLIT"] > 1 else out
    strides = ("a_row", "a_column", "b_row", "b_column", "out_stride", "part_stride")
    constants: dict[str, object] = {
        **strides_of(form_of(request)),
        **blocks,
        "WHOLE": request.width["k"] % (blocks["BLOCK_K"] * blocks["SPLIT"]) == 0,
        "PRECISION": precision_of(request),
        "UPCAST": False,
    }
    arguments = dict.fromkeys(("a", "b"), f"*{narrow}") | {"out": f"*{out}"}
    arguments |= dict.fromkeys(("rows", "columns", "inner"), "i32") | dict.fromkeys(strides, "i64")
    arguments |= dict.fromkeys(constants, "constexpr")
    return Signature(arguments, constants, _divisible(request, strides))


def _divisible(request: Request, strides: tuple[str, ...]) -> tuple[str, ...]:
    widths = {"rows": request.rows, "columns": request.width["n"], "inner": request.width["k"]}
    divisible = [name for name, width in widths.items() if width % 16 == 0]
    form = form_of(request)
    lengths = {
        "a_row": "inner", "a_column": "rows", "b_row": "columns", "b_column": "inner",
        "out_stride": "columns", "part_stride": "columns",
    }  # fmt: skip
    ones = strides_of(form)
    return (*divisible, *(name for name in strides if name not in ones and lengths[name] in divisible))


def form_of(request: Request) -> str:
    """Return the entry of :data:`FORMS` that is among the request's flags."""
    return next(flag for flag in request.flags if flag in FORMS)


def _examples(architecture: str) -> Iterator[Request]:
    types = ("bfloat16", "bfloat16")
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)):
        for rows in (64, 16384):
            yield Request("gemm", architecture, types, (("n", n), ("k", k)), rows, ("nt",))
    yield Request("gemm", architecture, types, (("n", 4096), ("k", 14336)), 16384, ("nn",))
    yield Request("gemm", architecture, types, (("n", 4096), ("k", 16384)), 14336, ("tn",))


def _sum_configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048):
        for warps in (4, 8):
            yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _sum_signature(request: Request, config: Config) -> Signature:
    numbers = {"size": "i64", "columns": "i32", "part_stride": "i64", "out_stride": "i64"}
    arguments = {"parts": "*fp32", "out": f"*{TRITON_TYPE[request.dtypes[0]]}"} | numbers
    constants: dict[str, object] = {"PARTS": request.width["parts"], **config.constants}
    return Signature(arguments | dict.fromkeys(constants, "constexpr"), constants, tuple(numbers))


def _sum_examples(architecture: str) -> Iterator[Request]:
    for parts in (2, 8):
        yield Request("gemm_sum", architecture, ("bfloat16",), (("n", 4096), ("parts", parts)), 64)


def _moved_bytes(request: Request) -> float:
    m, n, k = request.rows, request.width["n"], request.width["k"]
    return (m + n) * k * bytes_of(request.dtypes[0]) + m * n * bytes_of(request.dtypes[1])


KERNELS = (
    Kernel(
        name="gemm",
        source="gemm/kernel.py",
        function="gemm",
        widths=("n", "k"),
        configs=_configs,
        default=_default,
        shared_bytes=shared_bytes,
        signature=_signature,
        examples=_examples,
        moved_bytes=_moved_bytes,
        flops=lambda request: 2.0 * request.rows * request.width["n"] * request.width["k"],
        matrix=True,
        reference="a @ b",
    ),
    Kernel(
        name="gemm_sum",
        source="gemm/kernel.py",
        function="gemm_sum",
        widths=("n", "parts"),
        configs=_sum_configs,
        default=lambda request: Config((("BLOCK", 1024),), num_warps=4, num_stages=1),
        shared_bytes=lambda request, config: 0,
        signature=_sum_signature,
        examples=_sum_examples,
        moved_bytes=lambda request: (
            request.rows * request.width["n"] * (4 * request.width["parts"] + bytes_of(request.dtypes[0]))
        ),
        reference="parts.sum(0)",
    ),
)
"""A request for ``gemm`` holds the inputs' type and the result's type; ``rows`` is M; flags are an entry of
:data:`FORMS` and optionally ``tf32``. A request for ``gemm_sum`` holds only the result's type."""

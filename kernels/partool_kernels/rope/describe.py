"""Descriptions of the kernels of rotary position embedding, for the registry."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

_LARGEST = 16384
"""Maximum number of elements of a tile; more would not fit the registers."""


def half_block(width: int) -> int:
    """Return the number of columns of a tile: half of the head dimension, rounded up to a power of two."""
    return 1 << max(width // 2 - 1, 0).bit_length()


def _block(heads: int, most: int) -> int:
    return min(1 << max(heads - 1, 0).bit_length(), most)


def _config(tokens: int, heads: int, warps: int) -> Config:
    return Config((("BLOCK_T", tokens), ("BLOCK_N", heads)), num_warps=warps, num_stages=1)


def _configs(request: Request) -> Iterator[Config]:
    block = _block(request.width["n"], 128)
    for tokens in (1, 2, 4, 8, 16):
        for heads in sorted({block, max(block // 2, 1), max(block // 4, 1)}):
            elements = tokens * heads * half_block(request.width["d"])
            for warps in (2, 4, 8, 16):
                if elements <= _LARGEST // 2 and 4 <= elements // (32 * warps) <= 32:
                    yield _config(tokens, heads, warps)


def _default(request: Request) -> Config:
    """Return tiles of about 2048 pairs; a thread gets 16 pairs, or 8 if the weight and sums also take registers."""
    half, pairs = half_block(request.width["d"]), 2048
    heads = _block(request.width["n"], max(pairs // half, 1))
    return _config(max(pairs // (half * heads), 1), heads, 8 if request.kernel == "rope_norm_backward" else 4)


_TILE = ("BLOCK_T", "BLOCK_N", "BLOCK_D")
_TABLES = ("cos_stride", "sin_stride")
_COUNTS = ("tokens", "length", "heads", "half")


def _strides(*tensors: str) -> tuple[str, ...]:
    return tuple(f"{tensor}_{axis}" for tensor in tensors for axis in ("batch", "token", "head"))


_POINTERS = {
    "rope": ("cos", "sin", "heads_in", "out"),
    "rope_norm_forward": ("cos", "sin", "weight", "heads_in", "out"),
    "rope_norm_backward": ("cos", "sin", "weight", "heads_in", "grad", "grad_in", "partial"),
}
_WIDE = ("cos", "sin", "partial")
_MOVED = {"rope": 2, "rope_norm_forward": 2, "rope_norm_backward": 3}
"""Number of times that each kernel reads or writes all heads."""


def _signature(request: Request, config: Config) -> Signature:
    type_ = TRITON_TYPE[request.dtypes[0]]
    strides = (*_strides("in", *(("grad",) if "backward" in request.kernel else ()), "out"), *_TABLES)
    last = "turn" if request.kernel == "rope" else "eps"
    arguments = {name: "*fp32" if name in _WIDE else f"*{type_}" for name in _POINTERS[request.kernel]}
    arguments |= dict.fromkeys(strides, "i64") | dict.fromkeys(_COUNTS, "i32") | {last: "fp32"}
    even = (*(strides if request.width["d"] % 16 == 0 else ()), *(("half",) if request.width["d"] % 32 == 0 else ()))
    constants = config.constants | {"BLOCK_D": half_block(request.width["d"])}
    return Signature(arguments | dict.fromkeys(_TILE, "constexpr"), constants, divisible=even)


def _kernel(name: str, reference: str) -> Kernel:
    def examples(architecture: str) -> Iterator[Request]:
        for heads, width in ((32, 128), (8, 128), (5, 80)):
            yield Request(name, architecture, ("bfloat16",), (("n", heads), ("d", width)), 16384)

    def moved_bytes(request: Request) -> float:
        heads = request.rows * request.width["n"] * request.width["d"]
        tables = 2 * request.rows * (request.width["d"] // 2) * 4
        return _MOVED[name] * heads * bytes_of(request.dtypes[0]) + tables

    return Kernel(
        name=name,
        source="rope/kernel.py",
        function=name,
        widths=("n", "d"),
        configs=_configs,
        default=_default,
        # Shared memory holds the angles, which are read once and used for all heads.
        shared_bytes=lambda request, config: 32 * config.constants["BLOCK_T"] * half_block(request.width["d"]),
        signature=_signature,
        examples=examples,
        moved_bytes=moved_bytes,
        reference=reference,
    )


KERNELS = (
    _kernel("rope", "x * cos + rotate_half(x) * sin"),
    _kernel("rope_norm_forward", "rotate(rms_norm(x))"),
    _kernel("rope_norm_backward", "gradients of rotate(rms_norm(x))"),
)

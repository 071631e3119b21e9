"""Descriptions of the kernels of 1-bit compression, for the registry."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

CHUNKS = (512, 1024, 2048, 4096, 8192)
"""Allowed sizes of a chunk, in elements; a chunk has one scale, and one program holds the chunk in registers."""
NORMS = ("l1", "l2")
"""Definitions of a scale: ``l1`` is the mean magnitude, ``l2`` the root mean square."""


def _pack_configs(request: Request) -> Iterator[Config]:
    for warps in (1, 2, 4, 8, 16):
        if 4 <= request.width["chunk"] // (warps * 32) <= 64:
            yield Config(num_warps=warps, num_stages=1)


def _pack_default(request: Request) -> Config:
    lanes = 64 if request.architecture.startswith("gfx") else 32
    return Config(num_warps=max(1, min(16, request.width["chunk"] // (lanes * 16))), num_stages=1)


def _pack_signature(request: Request, config: Config) -> Signature:
    arguments = {
        "x": f"*{TRITON_TYPE[request.dtypes[0]]}",
        "error": "*fp32",
        "lost": "*fp32",
        "bits": "*u8",
        "scales": "*fp32",
    }
    constants: dict[str, object] = {"NORM": request.flags[0], "CHUNK": request.width["chunk"]}
    return Signature(arguments | {"size": "i64"} | dict.fromkeys(constants, "constexpr"), constants, ("size",))


def _unpack_configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048, 4096):
        for warps in (1, 2, 4, 8):
            if block <= request.width["chunk"] and 8 <= block // (warps * 32) <= 32:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _unpack_default(request: Request) -> Config:
    return Config((("BLOCK", min(request.width["chunk"], 2048)),), num_warps=4, num_stages=1)


def _unpack_signature(request: Request, config: Config) -> Signature:
    arguments = {"bits": "*u8", "scales": "*fp32", "out": f"*{TRITON_TYPE[request.dtypes[0]]}"}
    arguments |= {"size": "i64", "chunks": "i64", "senders": "i32"}
    constants: dict[str, object] = {"CHUNK": request.width["chunk"], **config.constants}
    return Signature(arguments | dict.fromkeys(constants, "constexpr"), constants, ("size",))


def _pack_examples(architecture: str) -> Iterator[Request]:
    for chunk in (2048, 8192):
        yield Request("onebit_pack", architecture, ("float32",), (("chunk", chunk),), 1 << 26, ("l2",))


def _unpack_examples(architecture: str) -> Iterator[Request]:
    for chunk in (2048, 8192):
        shape = (("chunk", chunk), ("senders", 8))
        yield Request("onebit_unpack", architecture, ("float32",), shape, 1 << 23)


def _packed_bytes(request: Request) -> float:
    return 1 / 8 + 4 / request.width["chunk"]


KERNELS = (
    Kernel(
        name="onebit_pack",
        source="onebit/kernel.py",
        function="onebit_pack",
        widths=("chunk",),
        configs=_pack_configs,
        default=_pack_default,
        shared_bytes=lambda request, config: max(4 * config.num_warps, request.width["chunk"] // 8),
        signature=_pack_signature,
        examples=_pack_examples,
        moved_bytes=lambda request: request.rows * (bytes_of(request.dtypes[0]) + 8 + _packed_bytes(request)),
        reference="ten passes: add, norm, sign, product, difference, comparison, shift, sum, cast",
    ),
    Kernel(
        name="onebit_unpack",
        source="onebit/kernel.py",
        function="onebit_unpack",
        widths=("chunk", "senders"),
        configs=_unpack_configs,
        default=_unpack_default,
        # Bits and elements are spread over threads differently, so data changes its layout in shared memory.
        shared_bytes=lambda request, config: 4 * config.constants["BLOCK"],
        signature=_unpack_signature,
        examples=_unpack_examples,
        # All elements of a block share a scale.
        legal=lambda request, config: config.constants["BLOCK"] <= request.width["chunk"],
        moved_bytes=lambda request: (
            request.rows * (bytes_of(request.dtypes[0]) + request.width["senders"] * _packed_bytes(request))
        ),
        reference="(where(bits, 1, -1) * scales).mean(0)",
    ),
)
"""``rows`` is the number of elements. A request's type is that of x for ``onebit_pack``, and that of the result for
``onebit_unpack``; errors and scales are float32."""

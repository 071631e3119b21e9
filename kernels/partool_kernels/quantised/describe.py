"""Descriptions of the kernels that make numbers of quantised matrices, for the registry."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature


def _configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048, 4096):
        for warps in (2, 4, 8):
            if 4 <= block // (warps * 32) <= 32:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _default(request: Request) -> Config:
    return Config((("BLOCK", 1024),), num_warps=4, num_stages=1)


def _kernel(name: str, codes: str, code_bytes: float, scale_bytes: float) -> Kernel:
    def signature(request: Request, config: Config) -> Signature:
        arguments = {"codes": codes, "scales": "*fp32", "out": f"*{TRITON_TYPE[request.dtypes[0]]}", "columns": "i32"}
        arguments["skipped"] = "i32"
        return Signature(arguments | {"BLOCK": "constexpr"}, config.constants, ("columns", "skipped"))

    def examples(architecture: str) -> Iterator[Request]:
        for width in (4096, 14336):
            yield Request(name, architecture, ("bfloat16",), (("n", width),), 4096)

    def moved_bytes(request: Request) -> float:
        return request.rows * (request.width["n"] * (code_bytes + bytes_of(request.dtypes[0])) + scale_bytes)

    return Kernel(
        name=name,
        source="quantised/kernel.py",
        function=name,
        widths=("n",),
        configs=_configs,
        default=_default,
        shared_bytes=lambda request, config: 0,
        signature=signature,
        examples=examples,
        moved_bytes=moved_bytes,
        reference="a look-up of each code, a product with the widened scales, a cast",
    )


KERNELS = (
    _kernel("dequantise_nf4", "*u8", 0.5 + 4 / 64, 0.0),
    _kernel("dequantise_int8", "*i8", 1.0, 4.0),
)
"""``rows`` and ``n`` are those of the matrix; a request's type is that of its numbers."""

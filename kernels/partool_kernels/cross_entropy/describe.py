"""Shapes, configurations and compiler arguments of the cross entropy kernels, for the registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

_VOCABULARIES = (32000, 128256, 262144)
"""Vocabulary sizes of Llama 2, Llama 3 and Gemma 3."""


def _lanes(request: Request) -> int:
    return 64 if request.architecture.startswith("gfx") else 32


def _configs(request: Request) -> Iterator[Config]:
    for block in (2048, 4096, 8192, 16384, 32768):
        for warps in (4, 8, 16, 32):
            # Triton launches no more than 1024 threads.
            if warps * _lanes(request) <= 1024 and 8 <= block // (warps * _lanes(request)) <= 32:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _default(request: Request) -> Config:
    return Config((("BLOCK", 8192),), num_warps=8, num_stages=1)


def _rows_signature(
    request: Request, config: Config, arguments: Mapping[str, str], constants: Mapping[str, object]
) -> Signature:
    pointers = {name: type_.format(t=TRITON_TYPE[request.dtypes[0]]) for name, type_ in arguments.items()}
    constants = {"CAP": "cap" in request.flags, **constants, **config.constants}
    return Signature(
        pointers | dict.fromkeys(constants, "constexpr"),
        constants,
        divisible=tuple(name for name in arguments if name.endswith("stride") or name == "columns"),
    )


_WHOLE = {
    "logits": "*{t}", "labels": "*i64", "out": "*{t}", "losses": "*fp32",
    "logits_stride": "i64", "out_stride": "i64", "columns": "i32", "scale": "fp32", "z_loss": "fp32", "cap": "fp32",
}  # fmt: skip
_PARTS = {
    "logits": "*{t}", "labels": "*i64", "highest": "*fp32", "sums": "*fp32", "targets": "*fp32",
    "logits_stride": "i64", "columns": "i32", "first": "i32", "cap": "fp32",
}  # fmt: skip
_GRADIENT = {
    "logits": "*{t}", "labels": "*i64", "log_totals": "*fp32", "scale": "*fp32", "out": "*{t}",
    "logits_stride": "i64", "out_stride": "i64", "columns": "i32", "first": "i32", "z_loss": "fp32", "cap": "fp32",
}  # fmt: skip


def _constants(request: Request) -> dict[str, object]:
    return {"GRADIENT": "gradient" in request.flags} if request.kernel == "cross_entropy" else {}


def _examples(name: str, architecture: str) -> Iterator[Request]:
    gradient = ("gradient",) if name == "cross_entropy" else ()
    for vocabulary in _VOCABULARIES:
        yield Request(name, architecture, ("bfloat16",), (("v", vocabulary),), 4096, gradient)
    yield Request(name, architecture, ("bfloat16",), (("v", 262144),), 4096, ("cap", *gradient))


def _passes(request: Request) -> int:
    """Return the number of times that the requested kernel reads or writes all logits."""
    if request.kernel == "cross_entropy":
        return 3 if "gradient" in request.flags else 1
    return 1 if request.kernel == "cross_entropy_parts" else 2


def _over_rows(name: str, arguments: Mapping[str, str]) -> Kernel:
    return Kernel(
        name=name,
        source="cross_entropy/kernel.py",
        function=name,
        widths=("v",),
        configs=_configs,
        default=_default,
        # Warps exchange a sum and a maximum through shared memory.
        shared_bytes=lambda request, config: 8 * config.num_warps,
        signature=lambda request, config: _rows_signature(request, config, arguments, _constants(request)),
        examples=lambda architecture: _examples(name, architecture),
        moved_bytes=lambda request: _passes(request) * request.rows * request.width["v"] * bytes_of(request.dtypes[0]),
        reference="F.cross_entropy(logits.float(), labels)",
    )


def _scaled_configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048, 4096):
        for warps in (2, 4, 8):
            if 4 <= block // (warps * _lanes(request)) <= 32:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _scaled_signature(request: Request, config: Config) -> Signature:
    come, go = (f"*{TRITON_TYPE[dtype]}" for dtype in request.dtypes)
    arguments = {"x": come, "factor": "*fp32", "out": go, "columns": "i32", "BLOCK": "constexpr"}
    return Signature(arguments, config.constants, divisible=("columns",))


def _scaled_examples(architecture: str) -> Iterator[Request]:
    for come in ("bfloat16", "float32"):
        yield Request("scaled", architecture, (come, "bfloat16"), (("n", 4096),), 128256)


def _scaled_default(request: Request) -> Config:
    return Config((("BLOCK", 1024),), num_warps=4 if _lanes(request) == 32 else 2, num_stages=1)


def _scaled_bytes(request: Request) -> float:
    return request.rows * request.width["n"] * sum(map(bytes_of, request.dtypes))


KERNELS = (
    _over_rows("cross_entropy", _WHOLE),
    _over_rows("cross_entropy_parts", _PARTS),
    _over_rows("cross_entropy_gradient", _GRADIENT),
    Kernel(
        name="scaled",
        source="cross_entropy/kernel.py",
        function="scaled",
        widths=("n",),
        configs=_scaled_configs,
        default=_scaled_default,
        shared_bytes=lambda request, config: 0,
        signature=_scaled_signature,
        examples=_scaled_examples,
        moved_bytes=_scaled_bytes,
        reference="(x * factor).to(dtype)",
    ),
)

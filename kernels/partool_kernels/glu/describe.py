"""Shapes, configurations and compiler arguments of the kernels for gated linear units, for the registry."""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

KINDS = ("gelu", "gelu_tanh", "silu")
"""Activations of the gate."""


def _configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048, 4096, 8192):
        for warps in (4, 8, 16):
            if 16 <= block // (warps * 32) <= 64 or block == 1024:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _default(request: Request) -> Config:
    return Config((("BLOCK", 2048 if request.architecture.startswith("gfx") else 1024),), num_warps=4, num_stages=1)


def _signature(request: Request, config: Config, pointers: tuple[str, ...]) -> Signature:
    (type_,) = request.dtypes
    strides = tuple(f"{name}_stride" for name in pointers)
    return Signature(
        dict.fromkeys(pointers, f"*{TRITON_TYPE[type_]}")
        | dict.fromkeys(strides, "i64")
        | {"columns": "i32", "KIND": "constexpr", "BLOCK": "constexpr"},
        {"KIND": request.flags[0], **config.constants},
        divisible=(*strides, "columns"),
    )


_FORWARD = ("gate", "up", "out")
_BACKWARD = ("grad", "gate", "up", "grad_gate", "grad_up")


def _kernel(name: str, pointers: tuple[str, ...]) -> Kernel:
    def examples(architecture: str) -> Iterator[Request]:
        for width in (8192, 14336):
            yield Request(name, architecture, ("bfloat16",), (("f", width),), 16384, ("silu",))

    return Kernel(
        name=name,
        source="glu/kernel.py",
        function=name,
        widths=("f",),
        configs=_configs,
        default=_default,
        shared_bytes=lambda request, config: 0,
        signature=lambda request, config: _signature(request, config, pointers),
        examples=examples,
        moved_bytes=lambda request: len(pointers) * request.rows * request.width["f"] * bytes_of(request.dtypes[0]),
        reference="F.silu(gate) * up",
    )


KERNELS = (_kernel("glu_forward", _FORWARD), _kernel("glu_backward", _BACKWARD))

"""Description of the AdamW kernel for the registry.

A request's ``rows`` is the total number of elements of all tensors; a request has no widths.
"""

from __future__ import annotations

from collections.abc import Iterator

from partool_kernels.registry.dtypes import TRITON_TYPE, bytes_of
from partool_kernels.registry.types import Config, Kernel, Request, Signature

_NUMBERS = ("kept", "beta1", "rest1", "beta2", "rest2", "step_size", "root", "eps", "scale")
"""Names of the numbers that change from step to step, in the order of the kernel's arguments."""


def _configs(request: Request) -> Iterator[Config]:
    for block in (512, 1024, 2048, 4096, 8192):
        for warps in (2, 4, 8, 16):
            # A thread gets at least four elements (one memory access); 32 elements would not fit the registers.
            if 4 <= block // (warps * 32) <= 16:
                yield Config((("BLOCK", block),), num_warps=warps, num_stages=1)


def _default(request: Request) -> Config:
    return Config((("BLOCK", 2048),), num_warps=8 if request.architecture.startswith("sm") else 4, num_stages=1)


def _signature(request: Request, config: Config) -> Signature:
    return Signature(
        {"tensors": "*i64", "owners": "*i32"}
        | dict.fromkeys(_NUMBERS, "fp32")
        | {"GRADIENT": "constexpr", "BLOCK": "constexpr"},
        {"GRADIENT": TRITON_TYPE[request.dtypes[1]], **config.constants},
    )


def _examples(architecture: str) -> Iterator[Request]:
    for gradient in ("float32", "bfloat16"):
        yield Request("adamw", architecture, ("float32", gradient), (), 2**28)


KERNELS = (
    Kernel(
        name="adamw",
        source="adamw/kernel.py",
        function="adamw",
        widths=(),
        configs=_configs,
        default=_default,
        shared_bytes=lambda request, config: 0,
        signature=_signature,
        examples=_examples,
        moved_bytes=lambda request: request.rows * (6.0 * 4 + bytes_of(request.dtypes[1])),
        reference="torch.optim.AdamW(fused=True)",
    ),
)

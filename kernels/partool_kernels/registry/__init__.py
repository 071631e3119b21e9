"""Registry that returns the implementation and configuration of a kernel for a device and shape.

It imports neither torch nor Triton, so a planner can use it where torch and Triton are not installed.
"""

from typing import TYPE_CHECKING, Any

from partool_kernels.registry.architectures import ARCHITECTURES, Architecture
from partool_kernels.registry.types import SOURCES, Choice, Config, Kernel, Request, Signature, Source

if TYPE_CHECKING:
    from partool_kernels.registry.kernels import KERNELS

__all__ = [
    "ARCHITECTURES",
    "KERNELS",
    "SOURCES",
    "Architecture",
    "Choice",
    "Config",
    "Kernel",
    "Request",
    "Signature",
    "Source",
]


def __getattr__(name: str) -> Any:
    # The families' descriptions import the types above, so the table of all kernels is imported only on request.
    if name != "KERNELS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from partool_kernels.registry import kernels

    return kernels.KERNELS

"""Which implementation and configuration of a kernel to use where.

Pure data and functions that import neither torch nor Triton, so that a planner can ask without either.
"""

from partool_kernels.registry.architectures import ARCHITECTURES, Architecture
from partool_kernels.registry.kernels import KERNELS
from partool_kernels.registry.types import SOURCES, Choice, Config, Kernel, Request, Signature, Source

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

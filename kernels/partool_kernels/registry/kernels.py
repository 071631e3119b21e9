"""All Triton kernels by name, as their folders describe them."""

from __future__ import annotations

from partool_kernels.glu import describe as glu
from partool_kernels.registry.types import Kernel

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*glu.KERNELS,)}

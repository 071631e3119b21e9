"""All Triton kernels by name, as their folders describe them."""

from __future__ import annotations

from partool_kernels.cross_entropy import describe as cross_entropy
from partool_kernels.glu import describe as glu
from partool_kernels.moe import describe as moe
from partool_kernels.norm import describe as norm
from partool_kernels.registry.types import Kernel

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        *cross_entropy.KERNELS,
        *glu.KERNELS,
        *moe.KERNELS,
        *norm.KERNELS,
    )
}

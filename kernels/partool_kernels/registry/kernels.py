"""All Triton kernels by name; each kernel's package describes it."""

from __future__ import annotations

from partool_kernels.adamw import describe as adamw
from partool_kernels.cross_entropy import describe as cross_entropy
from partool_kernels.fp8 import describe as fp8
from partool_kernels.gemm import describe as gemm
from partool_kernels.gemm_a8w8 import describe as gemm_a8w8
from partool_kernels.glu import describe as glu
from partool_kernels.grouped_gemm import describe as grouped_gemm
from partool_kernels.moe import describe as moe
from partool_kernels.norm import describe as norm
from partool_kernels.onebit import describe as onebit
from partool_kernels.quantised import describe as quantised
from partool_kernels.registry.types import Kernel
from partool_kernels.rope import describe as rope

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        *adamw.KERNELS,
        *cross_entropy.KERNELS,
        *fp8.KERNELS,
        *gemm.KERNELS,
        *gemm_a8w8.KERNELS,
        *glu.KERNELS,
        *grouped_gemm.KERNELS,
        *moe.KERNELS,
        *onebit.KERNELS,
        *quantised.KERNELS,
        *rope.KERNELS,
        *norm.KERNELS,
    )
}

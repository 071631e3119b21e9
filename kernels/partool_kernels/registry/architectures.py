"""Architectures that kernels are compiled and tuned for, with the limits that decide what can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU's instruction set."""

    name: str
    """Name of the architecture, such as ``sm_90`` or ``gfx942``."""
    backend: Literal["cuda", "hip"]
    target: int | str
    """Name in Triton's ``GPUTarget``."""
    lanes: int
    """Threads of a warp or wavefront."""
    shared_bytes: int
    """Maximum shared memory (LDS) of a block. Triton compiles kernels that need more; only the launch fails."""
    fp8: str | None
    """torch's name of the 8-bit type that the matrix units multiply; the other 8-bit type is emulated or refused."""
    matrix: tuple[str, ...]
    """Instructions of the matrix units; the assembly of a tuned product has to contain at least one of these."""


_KIB = 1024
# Shared memory: NVIDIA, "CUDA C++ Programming Guide", compute capabilities; AMD, "CDNA 3" and
# "CDNA 4 Instruction Set Architecture".
# fp8: OCP's e4m3fn on Hopper, Blackwell and gfx950; gfx942 multiplies e4m3fnuz and emulates e4m3fn in 16 bits.
ARCHITECTURES: dict[str, Architecture] = {
    each.name: each
    for each in (
        Architecture("sm_80", "cuda", 80, 32, 163 * _KIB, None, ("mma.sync",)),
        Architecture("sm_90", "cuda", 90, 32, 227 * _KIB, "float8_e4m3fn", ("wgmma.mma_async", "mma.sync")),
        Architecture("sm_100", "cuda", 100, 32, 227 * _KIB, "float8_e4m3fn", ("tcgen05.mma", "mma.sync")),
        Architecture("gfx942", "hip", "gfx942", 64, 64 * _KIB, "float8_e4m3fnuz", ("v_mfma_",)),
        Architecture("gfx950", "hip", "gfx950", 64, 160 * _KIB, "float8_e4m3fn", ("v_mfma_",)),
    )
}
"""Architectures by name."""

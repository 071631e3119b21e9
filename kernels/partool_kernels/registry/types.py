"""Requests to the registry, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Source = Literal["exact", "rows", "shape", "device", "modelled", "heuristic"]
SOURCES: tuple[Source, ...] = ("heuristic", "modelled", "device", "shape", "rows", "exact")
"""Sources of a configuration, the least certain first: computed by a rule; an unmeasured entry; measured on another
device of the architecture; on this device for widths within an octave; for the same widths and another number of
rows; for the same widths and rows."""


@dataclass(frozen=True, slots=True)
class Config:
    """Options with which a kernel is compiled and launched."""

    blocks: tuple[tuple[str, int], ...] = ()
    """Constants by name: tile sizes, parts of a split sum."""
    num_warps: int = 4
    num_stages: int = 2
    waves_per_eu: int = 0
    """AMD only: target number of wavefronts per SIMD; 0: the compiler's choice."""
    matrix_instr_nonkdim: int = 0
    """AMD only: rows of a matrix instruction; 0: the compiler's choice."""

    @property
    def constants(self) -> dict[str, int]:
        """The constants by name."""
        return dict(self.blocks)

    def options(self, backend: str) -> dict[str, int | bool]:
        """Return the options of Triton's compiler and launches besides constants, for ``cuda`` or ``hip``.

        Multiplications and additions are fused as by default in Triton up to 3.9; later defaults change the results.
        """
        found: dict[str, int | bool] = {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True
        }  # fmt: skip
        if backend == "hip":
            found |= {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """The computation of a kernel, and the device that it runs on. Hashable."""

    kernel: str
    """Name in :data:`partool_kernels.registry.KERNELS`."""
    architecture: str
    """Name in :data:`partool_kernels.registry.ARCHITECTURES`."""
    dtypes: tuple[str, ...]
    """Types of the tensors it reads and writes, by torch's names (``bfloat16``), in the kernel's own order."""
    shape: tuple[tuple[str, int], ...]
    """Widths that must equal those of a tuned entry, by name and in the kernel's own order: ``(("n", 4096),)``."""
    rows: int
    """The width that varies from call to call (M, tokens); each entry holds for a bucket of it."""
    flags: tuple[str, ...] = ()
    """Variants of the computation, sorted."""
    device: str = ""
    """Name of the device, as the driver reports it: ``NVIDIA H200``."""
    units: int = 0
    """Multiprocessors or compute units of the device; 0: unknown."""
    triton: str = ""
    """Major and minor version; empty: any."""

    @property
    def width(self) -> dict[str, int]:
        """The widths by name."""
        return dict(self.shape)


@dataclass(frozen=True, slots=True)
class Signature:
    """Facts about a call that Triton's compiler needs."""

    arguments: Mapping[str, str]
    """Type of every argument by name: ``*bf16``, ``i32``, ``fp32``; ``constexpr`` for constants."""
    constants: Mapping[str, object]
    """Values of the constants, including those of the configuration."""
    divisible: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16 in such calls; all pointers are."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel, described without importing Triton."""

    name: str
    source: str
    """File under ``partool_kernels`` that holds the kernel; its content is hashed into tuned tables."""
    function: str
    widths: tuple[str, ...]
    """Names of a request's shape."""
    configs: Callable[[Request], Iterator[Config]]
    """Yields every configuration worth measuring for a request."""
    default: Callable[[Request], Config]
    """Returns a good guess."""
    shared_bytes: Callable[[Request, Config], int]
    """Estimates the shared memory that a block needs, at least where it grows with the configuration."""
    signature: Callable[[Request, Config], Signature]
    examples: Callable[[str], Iterator[Request]]
    """Yields typical requests on an architecture: compiled in tests, and modelled where nothing was measured."""
    moved_bytes: Callable[[Request], float]
    """Least traffic of device memory of one call."""
    flops: Callable[[Request], float] = field(default=lambda request: 0.0)
    """Floating-point operations of matrix units in one call."""
    legal: Callable[[Request, Config], bool] = field(default=lambda request, config: True)
    """Whether a configuration, possibly found for other widths, computes the right result: some blocks have to cover a
    width, others to divide it."""
    matrix: bool = False
    """Whether its assembly has to use matrix units."""
    reference: str = ""
    """The reference that it is timed against, as one would write it in torch."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Answer of the registry."""

    implementation: str
    """``triton``, or another implementation that was faster."""
    config: Config
    source: Source
    distance: float
    """0: measured for exactly this request. Otherwise octaves of widths and rows, and penalties, see ``distance``."""
    time_s: float | None = None
    """Seconds of one call, where measured or modelled."""
    reference_s: float | None = None
    """Seconds of the reference in the same run."""
    table: str = ""
    """File that holds the entry."""


class Reader(Protocol):
    """Another tool's files of configurations."""

    def choices(self, request: Request) -> Iterable[Choice]:
        """Yield configurations for one of partool's kernels, the nearest first."""

    def coverage(self, request: Request) -> Iterable[Choice]:
        """Yield configurations of the other tool's own kernel for the same computation."""

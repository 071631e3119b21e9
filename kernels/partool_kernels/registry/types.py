"""Requests to the registry, and the registry's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Source = Literal["exact", "rows", "shape", "device", "modelled", "heuristic"]
SOURCES: tuple[Source, ...] = ("heuristic", "modelled", "device", "shape", "rows", "exact")
"""Sources of a configuration, the least certain first: the kernel's rule; an unmeasured entry; a measurement on another
device of the architecture; and three kinds of measurements on the request's device, for widths within an octave, for
equal widths but other rows, and for equal widths and rows."""


@dataclass(frozen=True, slots=True)
class Config:
    """Options with which a kernel is compiled and launched."""

    blocks: tuple[tuple[str, int], ...] = ()
    """Constants by name: tile sizes and the number of parts of a split sum."""
    num_warps: int = 4
    num_stages: int = 2
    waves_per_eu: int = 0
    """AMD only: target number of wavefronts per SIMD; 0 leaves the choice to the compiler."""
    matrix_instr_nonkdim: int = 0
    """AMD only: rows of a matrix instruction; 0 leaves the choice to the compiler."""

    @property
    def constants(self) -> dict[str, int]:
        """The constants by name."""
        return dict(self.blocks)

    def options(self, backend: str) -> dict[str, int | bool]:
        """Return the options of Triton's compiler and launches, without the constants, for ``cuda`` or ``hip``.

        Multiplications and additions are fused, the default of Triton up to 3.9; later defaults would change results.
        """
        options: dict[str, int | bool] = {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True
        }  # fmt: skip
        if backend == "hip":
            options |= {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
        return options


@dataclass(frozen=True, slots=True)
class Request:
    """The computation of a kernel, and the device that it runs on. Hashable."""

    kernel: str
    """Name in :data:`partool_kernels.registry.KERNELS`."""
    architecture: str
    """Name in :data:`partool_kernels.registry.ARCHITECTURES`."""
    dtypes: tuple[str, ...]
    """Types of the tensors that the kernel reads and writes, by torch's names (``bfloat16``), in the kernel's order."""
    shape: tuple[tuple[str, int], ...]
    """Widths by name, in the kernel's order: ``(("n", 4096),)``; an entry was measured for exactly its widths."""
    rows: int
    """The size that changes from call to call (M, or the number of tokens); an entry is for a range of rows."""
    flags: tuple[str, ...] = ()
    """Variants of the computation, sorted."""
    device: str = ""
    """Name of the device, as the driver reports it: ``NVIDIA H200``."""
    units: int = 0
    """Number of multiprocessors or compute units of the device; 0 if unknown."""
    triton: str = ""
    """Major and minor version of Triton; empty means any version."""

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
    """Integer arguments that are multiples of 16 in the described calls; all pointers are aligned to 16 bytes."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel, described without importing Triton."""

    name: str
    source: str
    """File under ``partool_kernels`` that holds the kernel; tuned tables record a hash of the kernel's code."""
    function: str
    widths: tuple[str, ...]
    """Names of the widths in a request's ``shape``."""
    configs: Callable[[Request], Iterator[Config]]
    """Yields every configuration worth measuring for a request."""
    default: Callable[[Request], Config]
    """The kernel's rule: returns a good configuration without a measurement."""
    shared_bytes: Callable[[Request, Config], int]
    """Estimates the bytes of shared memory that a block needs; may omit a constant amount."""
    signature: Callable[[Request, Config], Signature]
    examples: Callable[[str], Iterator[Request]]
    """Yields typical requests on an architecture: tests compile them, and modelled entries are made for them."""
    moved_bytes: Callable[[Request], float]
    """Least number of bytes that a call moves to and from device memory."""
    flops: Callable[[Request], float] = field(default=lambda request: 0.0)
    """Number of floating-point operations that a call makes on matrix units."""
    legal: Callable[[Request, Config], bool] = field(default=lambda request, config: True)
    """Whether a configuration, possibly found for other widths, computes the right result: some kernels need blocks
    that cover a width, other kernels need blocks that divide it."""
    matrix: bool = False
    """Whether the kernel's assembly has to use matrix units."""
    reference: str = ""
    """Reference that the kernel is timed against, as torch code."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Answer of the registry."""

    implementation: str
    """``triton``, or another implementation that was faster."""
    config: Config
    source: Source
    distance: float
    """0 if measured for exactly this request; else the sum of octaves and penalties that ``distance`` defines."""
    time_s: float | None = None
    """Seconds of a call, where measured or modelled."""
    reference_s: float | None = None
    """Seconds of the reference in the same run."""
    table: str = ""
    """File that holds the entry."""


class Reader(Protocol):
    """Reader of another tool's files of configurations."""

    def choices(self, request: Request) -> Iterable[Choice]:
        """Yield configurations for one of partool's kernels, the nearest first."""

    def coverage(self, request: Request) -> Iterable[Choice]:
        """Yield configurations of the other tool's kernel that computes what the request's kernel computes."""

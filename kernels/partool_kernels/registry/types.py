"""What is asked of the registry, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Source = Literal["exact", "rows", "shape", "device", "modelled", "heuristic"]
SOURCES: tuple[Source, ...] = ("heuristic", "modelled", "device", "shape", "rows", "exact")
"""Where a configuration comes from, the least certain first: computed by a rule; an entry that nobody has measured;
measured on another device of the architecture; on this one for widths within an octave; for the same widths and
another number of rows; for the same widths and rows."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is compiled and launched."""

    blocks: tuple[tuple[str, int], ...] = ()
    """Its constants by name: tile sizes, parts of a split sum."""
    num_warps: int = 4
    num_stages: int = 2
    waves_per_eu: int = 0
    """AMD only: wavefronts that are to fit a SIMD; 0: as the compiler likes."""
    matrix_instr_nonkdim: int = 0
    """AMD only: rows of a matrix instruction; 0: likewise."""

    @property
    def constants(self) -> dict[str, int]:
        """The constants by name."""
        return dict(self.blocks)

    def options(self, backend: str) -> dict[str, int | bool]:
        """Return what Triton's compiler and launches are told besides constants, for ``cuda`` or ``hip``.

        Multiplications and additions are fused as Triton did by default until 3.9; later ones would change the results.
        """
        found: dict[str, int | bool] = {
            "num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True
        }  # fmt: skip
        if backend == "hip":
            found |= {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """What a kernel has to compute, and where. Hashable."""

    kernel: str
    """Name in :data:`partool_kernels.registry.KERNELS`."""
    architecture: str
    """Name in :data:`partool_kernels.registry.ARCHITECTURES`."""
    dtypes: tuple[str, ...]
    """Of what it reads and writes, as torch calls them (``bfloat16``), in the kernel's own order."""
    shape: tuple[tuple[str, int], ...]
    """Widths that have to be those of a tuned entry, by name and in the kernel's own order: ``(("n", 4096),)``."""
    rows: int
    """The width that varies from call to call (M, tokens); entries hold for buckets of it."""
    flags: tuple[str, ...] = ()
    """Variants of the computation, sorted."""
    device: str = ""
    """As the driver calls it: ``NVIDIA H200``."""
    units: int = 0
    """Multiprocessors or compute units of the device; 0: not known."""
    triton: str = ""
    """Major and minor version; empty: of no interest."""

    @property
    def width(self) -> dict[str, int]:
        """The widths by name."""
        return dict(self.shape)


@dataclass(frozen=True, slots=True)
class Signature:
    """What Triton's compiler needs to know of a call."""

    arguments: Mapping[str, str]
    """Type of every argument by name: ``*bf16``, ``i32``, ``fp32``; ``constexpr`` for constants."""
    constants: Mapping[str, object]
    """Values of the constants, those of the configuration included."""
    divisible: tuple[str, ...] = ()
    """Numbers that are multiples of 16 in such calls, as all pointers are."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel, described without importing Triton."""

    name: str
    source: str
    """File under ``partool_kernels`` that holds it; its content is hashed into tuned tables."""
    function: str
    widths: tuple[str, ...]
    """Names of a request's shape."""
    configs: Callable[[Request], Iterator[Config]]
    """Everything worth measuring for a request."""
    default: Callable[[Request], Config]
    """A good guess."""
    shared_bytes: Callable[[Request, Config], int]
    """Estimate of the shared memory that a block needs, at least where it grows with the configuration."""
    signature: Callable[[Request, Config], Signature]
    examples: Callable[[str], Iterator[Request]]
    """Typical requests on an architecture: what is compiled in tests, and modelled where nothing was measured."""
    moved_bytes: Callable[[Request], float]
    """Least traffic of device memory of one call."""
    flops: Callable[[Request], float] = field(default=lambda request: 0.0)
    """Of matrix units in one call."""
    legal: Callable[[Request, Config], bool] = field(default=lambda request, config: True)
    """Whether a configuration, found for other widths perhaps, computes the right thing: blocks that have to cover a
    width do, and such as have to divide one do."""
    matrix: bool = False
    """Whether its assembly has to use matrix units."""
    reference: str = ""
    """What it is timed against, as one would write it in torch."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The registry's answer."""

    implementation: str
    """``triton``, or another one that was faster."""
    config: Config
    source: Source
    distance: float
    """0: measured for just this. Octaves of widths and rows, and penalties, see the look-up."""
    time_s: float | None = None
    """Of one call, where it was measured or modelled."""
    reference_s: float | None = None
    """Of the reference in the same run."""
    table: str = ""
    """File that holds it."""


class Reader(Protocol):
    """Another tool's files of configurations."""

    def choices(self, request: Request) -> Iterable[Choice]:
        """Yield what they hold for one of partool's kernels, the nearest first."""

    def coverage(self, request: Request) -> Iterable[Choice]:
        """Yield what they hold for the other tool's own kernel of the same computation."""

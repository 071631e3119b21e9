"""Check, without a compiler, whether a configuration can run for a request."""

from __future__ import annotations

from partool_kernels.registry.architectures import ARCHITECTURES
from partool_kernels.registry.kernels import KERNELS
from partool_kernels.registry.types import Config, Request

_MOST_THREADS = 1024
"""Maximum number of threads of a block, on all architectures."""
_INSTRUCTION_ROWS = (0, 4, 16, 32)
"""Allowed rows of AMD's matrix instructions; 0 leaves the choice to the compiler."""
_LEAST_OF_PRODUCTS = 16
"""Minimum rows, columns and inner width of ``tl.dot``."""


def obstacle(request: Request, config: Config, shared_bytes: int = 0) -> str | None:
    """Return why a configuration cannot run for a request, or None if it can run.

    ``shared_bytes`` is the shared memory that the compiler reported for the configuration's blocks, or 0 without a
    report. Triton compiles kernels that need more shared memory than a block may have; only their launch fails.
    """
    kernel, architecture = KERNELS[request.kernel], ARCHITECTURES[request.architecture]
    expected = kernel.default(request).constants
    if set(config.constants) != set(expected):
        return f"the kernel's constants are {', '.join(sorted(expected))}, not {', '.join(sorted(config.constants))}"
    if min(config.constants.values(), default=1) < 1:
        return f"a constant is below 1: {config.constants}"
    blocks = {name: size for name, size in config.constants.items() if name.startswith("BLOCK")}
    ranges = {name: size for name, size in config.constants.items() if name in blocks or name == "ROWS"}
    if any(size & (size - 1) for size in ranges.values()):
        return f"blocks are powers of two: {ranges}"
    if kernel.matrix and min(blocks.values(), default=_LEAST_OF_PRODUCTS) < _LEAST_OF_PRODUCTS:
        return f"products take blocks of {_LEAST_OF_PRODUCTS} and more: {blocks}"
    if config.num_warps < 1 or config.num_warps & (config.num_warps - 1):
        return f"{config.num_warps} warps are no power of two"
    if config.num_warps * architecture.lanes > _MOST_THREADS:
        return f"{config.num_warps} warps of {architecture.lanes} lanes are more than {_MOST_THREADS} threads"
    if config.matrix_instr_nonkdim not in _INSTRUCTION_ROWS:
        return f"there are no matrix instructions of {config.matrix_instr_nonkdim} rows"
    if not kernel.legal(request, config):
        return f"{config.constants} do not fit widths {request.width} and {request.rows} rows"
    need = max(shared_bytes, kernel.shared_bytes(request, config))
    if need > architecture.shared_bytes:
        return f"{need} bytes of shared memory are more than the {architecture.shared_bytes} of {architecture.name}"
    return None

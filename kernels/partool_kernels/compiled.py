"""Prove that configurations can run on absent GPUs: compile the kernels and read the resources that they need.

Triton's compiler needs no device. It accepts kernels that need more shared memory than a block may have, so
:mod:`partool_kernels.proof` compares the needed memory with the limit.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from partool_kernels.registry import ARCHITECTURES, KERNELS, Config, Request


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources that a kernel needs on an architecture."""

    shared_bytes: int
    registers: int
    """Registers per thread; on AMD only vector registers are counted."""
    spilled_bytes: int
    """Bytes per thread that the compiler spilled to memory for lack of registers."""
    matrix: bool
    """Whether the assembly uses matrix units of this architecture."""
    emulates_fp8: bool
    """Whether products of 8-bit numbers were compiled to products of a type with more than 8 bits."""


def compile_for(request: Request, config: Config) -> Compiled:
    """Compile the request's kernel for the request's architecture; errors of Triton's compiler pass through."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, architecture = KERNELS[request.kernel], ARCHITECTURES[request.architecture]
    module = importlib.import_module("partool_kernels." + kernel.source.removesuffix(".py").replace("/", "."))
    signature = kernel.signature(request, config)
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, type_) in enumerate(signature.arguments.items())
        if type_.startswith("*") or name in signature.divisible
    }
    source = ASTSource(
        getattr(module, kernel.function), dict(signature.arguments), dict(signature.constants), attributes
    )
    target = GPUTarget(architecture.backend, architecture.target, architecture.lanes)
    compiled = triton.compile(source, target=target, options=config.options(architecture.backend))
    read = _of_amd if architecture.backend == "hip" else _of_nvidia
    registers, spilled, text = read(compiled)
    eight_bits = any(dtype.startswith("float8") for dtype in request.dtypes)
    return Compiled(
        shared_bytes=int(compiled.metadata.shared),
        registers=registers,
        spilled_bytes=spilled,
        matrix=any(name in text for name in architecture.matrix),
        emulates_fp8=eight_bits and not _multiplies_fp8(text),
    )


def _of_amd(compiled: Any) -> tuple[int, int, str]:
    text = str(compiled.asm["amdgcn"])
    counts = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    return counts.get("vgpr_count", 0), 4 * counts.get("vgpr_spill_count", 0), text


def _of_nvidia(compiled: Any) -> tuple[int, int, str]:
    """Return registers per thread and spilled bytes per thread, as cuobjdump reports them, and the assembly."""
    import subprocess
    import tempfile

    from triton.backends import nvidia

    (folder,) = nvidia.__path__
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [f"{folder}/bin/cuobjdump", "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = dict(re.findall(r"(REG|STACK):(\d+)", report))
    return int(counts.get("REG", 0)), int(counts.get("STACK", 0)), str(compiled.asm["ptx"])


def _multiplies_fp8(text: str) -> bool:
    return (
        re.search(r"(wgmma|tcgen05\.mma|mma\.sync)[^\n]*(e4m3|e5m2|f8f6f4)|v_mfma\w*(fp8|bf8|f8f6f4)", text) is not None
    )

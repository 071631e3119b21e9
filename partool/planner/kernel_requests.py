"""What a plan's layout asks of kernels: every matrix product of a rank in all three passes, and its fused parts.

The gradient of a product's input is a product of the same rows, ``[M, K] = [M, N] · W``; that of its weight has the
outputs as rows and sums over tokens, ``[N, K] = [N, M] · [M, K]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from partool.layout.gemms import Gemm, Rows, gemms
from partool.plan.types import Plan
from partool_kernels.registry import ARCHITECTURES, KERNELS, Request

Part = Literal["forward", "input gradient", "weight gradient"]
PARTS: tuple[Part, ...] = ("forward", "input gradient", "weight gradient")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "bfloat16"}
"""Types of activations by precision, as torch calls them."""
_WIDE = ("head", "moe.router")
"""Products that stay in 16 bits under fp8 (arXiv 2412.19437, section 3.3)."""
_SECOND = (".o", ".down")
"""Products whose results are summed over tensor ranks, in pieces where those travel while the next is computed."""
_AGAIN = ("full", "keep_attention")
"""Policies that compute products once more for the backward pass."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A product in one pass, or a fused kernel."""

    name: str
    part: str
    """One of :data:`PARTS`, or what a fused kernel does."""
    kernel: str
    """Name in the registry; of products without one there, what of torch computes them."""
    request: Request | None
    """None: nothing in the registry computes it."""
    rows: Rows
    """Of its result."""
    sides: tuple[float, int, int]
    """M at the mean of rows, N, K."""
    groups: int
    """Products side by side."""
    calls: float
    """Per step, on the mean pipeline rank."""
    product: bool = True
    wide: bool = False
    """In 16 bits though the plan's precision is fp8."""
    moved_bytes: float | None = None
    """Traffic of memory of a call that is no product."""


def asked(plan: Plan, device: str) -> Iterator[Asked]:
    """Yield what a plan asks; ``device`` as the driver calls it."""
    for gemm, calls in counted(plan):
        yield from _passes(plan, gemm, calls, device)


def counted(plan: Plan) -> Iterator[tuple[Gemm, float]]:
    """Yield the products of a rank, rows as they are computed at once, with their passes forward per step.

    Counts are of the mean pipeline rank, nothing computed again. Matrices with one input are taken as one where latent
    attention is, as engines run such models; partool's own decoder and transformers keep them apart.
    """
    layout, model = plan.layout, plan.model
    joined, sequence = model.mla is not None, plan.training.sequence_length
    found = gemms(
        model, tensor=layout.mesh.tp, expert=layout.expert, tokens=plan.tokens, inner=layout.tensor_inner, joined=joined
    )
    for gemm in found:
        pieces = 1.0
        if gemm.name.startswith("ffn") and layout.mlp_tile_tokens:
            pieces = max(sequence / layout.mesh.cp / layout.mlp_tile_tokens, 1.0)
        elif gemm.name.endswith(_SECOND) and gemm.groups == 1:
            pieces = float(layout.tensor_chunks)
        elif gemm.name == "head" and layout.loss_tile_tokens:
            pieces = max(sequence / layout.mesh.cp / layout.loss_tile_tokens, 1.0)
        calls = gemm.layers * gemm.alike * layout.accumulation / layout.mesh.pp
        yield _cut(gemm, pieces), calls * pieces


def _cut(gemm: Gemm, pieces: float) -> Gemm:
    rows = gemm.rows
    if pieces == 1.0:
        return gemm
    least, most = (max(round(size / pieces), 1) for size in (rows.least, rows.most))
    return replace(gemm, rows=Rows(least, most, rows.mean / pieces))


def _passes(plan: Plan, gemm: Gemm, calls: float, device: str) -> Iterator[Asked]:
    policies = plan.layout.recompute
    again = sum(policy in _AGAIN for policy in policies) / len(policies) if gemm.name != "head" else 0.0
    mean, n, k = gemm.rows.mean, gemm.n, gemm.k
    outputs = Rows(n, n, n)
    sides: dict[Part, tuple[tuple[float, int, int], Rows]] = {
        "forward": ((mean, n, k), gemm.rows),
        "input gradient": ((mean, k, n), gemm.rows),
        "weight gradient": ((n, k, max(round(mean), 1)), outputs),
    }
    for part, (side, rows) in sides.items():
        kernel, request = _request(plan, gemm, part, side, device)
        times = calls * (1.0 + again) if part == "forward" else calls
        wide = plan.training.precision == "fp8" and gemm.name in _WIDE
        yield Asked(gemm.name, part, kernel, request, rows, side, gemm.groups, times, wide=wide)


def _request(
    plan: Plan, gemm: Gemm, part: Part, sides: tuple[float, int, int], device: str
) -> tuple[str, Request | None]:
    """Return the kernel that computes a product, and what it is asked; none where partool has no kernel for it."""
    devices, precision = plan.devices, plan.training.precision
    eight = precision == "fp8" and gemm.name not in _WIDE
    dtype = DTYPES[precision]
    kernel, library = _kernel(grouped=gemm.groups > 1, eight=eight)
    known = ARCHITECTURES.get(devices.architecture)
    if known is None or plan.kernels.mode == "torch" or kernel not in KERNELS or precision == "fp64":
        return library, None
    if eight and known.fp8 is None:
        return library, None
    dtypes = (known.fp8, dtype) if eight and known.fp8 else (dtype,)
    flags = ("rows",) if eight and part == "weight gradient" else ()
    rows, n, k = max(round(sides[0]), 1), sides[1], sides[2]
    shape = (("n", n), ("k", k))
    return kernel, Request(kernel, devices.architecture, dtypes, shape, rows, flags, device, devices.units)


def _kernel(*, grouped: bool, eight: bool) -> tuple[str, str]:
    """Return the registry's name of the kernel of a product, and what of torch computes it otherwise."""
    if grouped:
        return ("grouped_a8w8" if eight else "grouped_gemm"), "F.grouped_mm"
    return ("gemm_a8w8", "F.scaled_mm") if eight else ("gemm", "F.linear")

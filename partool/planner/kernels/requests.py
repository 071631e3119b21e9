"""Kernel requests of a plan's layout: every matrix product of a rank in all three passes.

The gradient of a product's input is a product with the same rows, ``[M, K] = [M, N] · W``; the gradient of its weight
has one row per output and sums over tokens, ``[N, K] = [N, M] · [M, K]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from partool.layout.gemms import MULTIPLE, Gemm, Rows, gemms
from partool.plan.schedule import ENDS_WITH_ONE
from partool.plan.types import Plan
from partool_kernels.registry import ARCHITECTURES, Request
from partool_kernels.registry.chunking import chunk_rows

Part = Literal["forward", "input gradient", "weight gradient"]
PARTS: tuple[Part, ...] = ("forward", "input gradient", "weight gradient")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "bfloat16"}
"""Torch's name of the activations' type, by precision."""
_WIDE = ("head", "moe.router", "moe.coefficients")
"""Matrix products that are computed in 16 bits even if the precision is fp8 (arXiv 2412.19437, section 3.3)."""
_SECOND = (".o", ".down")
"""Products whose outputs are all-reduced over tensor ranks. With ``chunks``, these products are computed in pieces, so
that all-reduces overlap with computation."""
_LOGITS = 2**26
"""Maximum number of logits that exist at once if ``tiles.loss`` is not set. If a micro-batch has more logits, the
backward pass recomputes the logits."""
_RUN = frozenset({"gemm_a8w8"})
"""Kernels of the registry that the runtime uses for products. Torch computes all products that are not in 8 bits, even
if tables list other kernels."""
_RECOMPUTES_PRODUCTS = ("full", "keep_attention")
"""Policies that recompute products for the backward pass."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The calls of a matrix product in one pass, or of a fused kernel."""

    name: str
    part: str
    """One of :data:`PARTS`, or the pass of a fused kernel."""
    request: Request | None
    """Request to the registry; None if no kernel of the registry computes the product."""
    library: str
    """Function of torch that computes the product; empty if a kernel of the registry computes it."""
    rows: Rows
    """Least, largest and mean number of rows of the product's output."""
    sides: tuple[float, int, int]
    """Sizes M, N and K of the product, for the mean number of rows."""
    groups: int
    """Number of products in one grouped call."""
    calls: float
    """Number of calls per step, as a mean over pipeline ranks."""
    product: bool = True
    wide: bool = False
    """True if the product is computed in 16 bits although the plan's precision is fp8."""
    moved_bytes: float | None = None
    """Bytes of memory traffic per call of a fused kernel; None for matrix products."""

    @property
    def kernel(self) -> str:
        """Name of the kernel or library that computes the product or the fused part."""
        return self.library or (self.request.kernel if self.request else "")


def asked(plan: Plan, device: str) -> Iterator[KernelUse]:
    """Yield the matrix products of a plan in all passes; ``device`` is the name that the driver reports."""
    for gemm, calls in counted(plan):
        yield from _passes(plan, gemm, calls, device)


def counted(plan: Plan) -> Iterator[tuple[Gemm, float]]:
    """Yield each product of a rank, with the rows of one call, and the number of its forward calls per step.

    Numbers of calls are means over pipeline ranks and leave out recomputation. Gate and up projections of experts are
    one product, as in transformers. All other matrices are separate products.
    """
    layout, sequence = plan.layout, plan.training.sequence_length
    tensor = layout.tensor
    sizes = {
        "tensor": layout.mesh.tp, "inner": tensor.inner, "expert": layout.expert, "expert_tensor": layout.expert_tensor,
        "tokens": plan.tokens,
    }  # fmt: skip
    for separate in gemms(plan.model, **sizes, shares=tensor.sequence_norms):
        gemm, pieces = _joined(separate), 1.0
        if gemm.name.startswith("ffn") and layout.tiles.mlp:
            pieces = max(sequence / layout.mesh.cp / layout.tiles.mlp, 1.0)
        elif gemm.name.endswith(_SECOND) and gemm.groups == 1:
            pieces = float(layout.tensor.chunks)
        elif gemm.name == "head":
            pieces = gemm.rows.mean / _loss_rows(plan, gemm)
        calls = gemm.layers * gemm.alike * layout.derived.accumulation / layout.mesh.pp
        yield _cut(gemm, pieces), calls * pieces


def early_loss(plan: Plan) -> bool:
    """Return True if gradients are computed together with the loss, as the backward pass follows at once."""
    layout = plan.layout
    return "loss" in layout.derived.fused and (layout.mesh.pp == 1 or layout.pipeline.schedule in ENDS_WITH_ONE)


def _loss_rows(plan: Plan, gemm: Gemm) -> int:
    """Return the number of rows of logits that exist at once."""
    tokens = round(gemm.rows.mean)
    if plan.layout.tiles.loss:
        return min(plan.layout.tiles.loss, tokens)
    if early_loss(plan):
        return chunk_rows(tokens, gemm.n, 4 if plan.training.precision == "fp32" else 2)
    return min(max(_LOGITS // gemm.n, 1), tokens)


def is_narrow(plan: Plan, gemm: Gemm) -> bool:
    """Return True if a product is computed in 8 bits."""
    fits = gemm.n % MULTIPLE == 0 and gemm.k % MULTIPLE == 0
    return plan.training.precision == "fp8" and gemm.name not in _WIDE and fits


def _joined(gemm: Gemm) -> Gemm:
    """Return the experts' gate and up projections as one fused product; return any other product unchanged."""
    if gemm.alike == 1 or not gemm.name.startswith("moe.experts"):
        return gemm
    return replace(gemm, n=gemm.alike * gemm.n, alike=1)


def _cut(gemm: Gemm, pieces: float) -> Gemm:
    rows = gemm.rows
    if pieces == 1.0:
        return gemm
    least, most = (max(round(size / pieces), 1) for size in (rows.least, rows.most))
    return replace(gemm, rows=Rows(least, most, rows.mean / pieces))


def _passes(plan: Plan, gemm: Gemm, calls: float, device: str) -> Iterator[KernelUse]:
    policies = plan.layout.recompute
    recompute_share = sum(policy in _RECOMPUTES_PRODUCTS for policy in policies) / len(policies)
    if gemm.name == "head":
        recompute_share = float(gemm.rows.mean < plan.tokens and not early_loss(plan))
    mean, n, k = gemm.rows.mean, gemm.n, gemm.k
    outputs = Rows(n, n, n)
    sides: dict[Part, tuple[tuple[float, int, int], Rows]] = {
        "forward": ((mean, n, k), gemm.rows),
        "input gradient": ((mean, k, n), gemm.rows),
        "weight gradient": ((n, k, max(round(mean), 1)), outputs),
    }
    for part, (side, rows) in sides.items():
        request, library = _request(plan, gemm, part, side, device)
        times = calls * (1.0 + recompute_share) if part == "forward" else calls
        wide = plan.training.precision == "fp8" and not is_narrow(plan, gemm)
        yield KernelUse(gemm.name, part, request, library, rows, side, gemm.groups, times, wide=wide)


def _request(
    plan: Plan, gemm: Gemm, part: Part, sides: tuple[float, int, int], device: str
) -> tuple[Request | None, str]:
    """Return (request to the registry, name of a torch function); the request is None if kernels cannot serve it.

    The function computes the product; its name is empty if a kernel of partool computes the product.
    """
    devices, precision = plan.devices, plan.training.precision
    eight = is_narrow(plan, gemm)
    form, library = _form(gemm, part, eight=eight)
    record = ARCHITECTURES.get(devices.architecture)
    if record is None or plan.kernels.mode == "torch" or precision == "fp64" or (eight and record.fp8 is None):
        return None, library
    rows, n, k = max(round(sides[0]), 1), sides[1], sides[2]
    shape = {"n": n, "k": k}
    if gemm.groups > 1:
        tokens = max(round(gemm.rows.mean * gemm.groups), 1)
        shape, rows = (shape, tokens) if part != "weight gradient" else ({"m": rows, "n": n}, tokens)
        shape["e"] = gemm.groups
    dtypes = (record.fp8 or "" if eight else DTYPES[precision], DTYPES[precision])
    at = (devices.architecture, dtypes, tuple(shape.items()), rows, form.flags, device, devices.units)
    return Request(form.kernel, *at), "" if form.kernel in _RUN else library


class _Form(NamedTuple):
    kernel: str
    flags: tuple[str, ...]


def _form(gemm: Gemm, part: Part, *, eight: bool) -> tuple[_Form, str]:
    """Return (the registry's kernel and flags for a product, name of the torch function that does the same)."""
    memory = {"forward": "nt", "input gradient": "nn", "weight gradient": "tn"}[part]
    if gemm.groups > 1:
        weights = part == "weight gradient"
        name = "grouped_a8w8" if eight else "grouped_gemm"
        return _Form(f"{name}_weight" if weights else name, () if weights or eight else (memory,)), "F.grouped_mm"
    if eight:
        return _Form("gemm_a8w8", ("rows",) if part == "weight gradient" else ()), "F.scaled_mm"
    return _Form("gemm", (memory,)), "F.linear"

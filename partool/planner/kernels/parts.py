"""Kernel calls of a plan's fused parts: norms, gates, rotations, the loss, the update, and conversions to 8 bits.

Rows and widths are those of the runtime's calls; numbers of calls are means over pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from partool.layout.gemms import Gemm, Rows
from partool.layout.parameters import parameters
from partool.plan.types import Plan
from partool.planner.kernels.requests import DTYPES, KernelUse, counted, early_loss, is_narrow
from partool.spec.training import Fused
from partool_kernels.registry import ARCHITECTURES, KERNELS, Request
from partool_kernels.registry.chunking import WIDE_ABOVE

_LIGHT = ("selective", "keep_attention", "full")
"""Policies that recompute norms, gates and rotations for the backward pass."""
_KINDS = {"swiglu": "silu", "geglu": "gelu"}


class _Use(NamedTuple):
    """Calls of one kernel with operands of one size."""

    name: str
    part: str
    kernel: str
    rows: float
    shape: dict[str, int]
    calls: float
    flags: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    """Data types of the operands; if the tuple is empty, all operands have the data type of activations."""


def parts(plan: Plan, device: str) -> Iterator[KernelUse]:
    """Yield the kernel calls of a plan's fused parts; ``device`` is the name that the driver reports."""
    devices, precision = plan.devices, plan.training.precision
    if devices.architecture not in ARCHITECTURES or plan.kernels.mode == "torch" or precision == "fp64":
        return
    for use in _uses(plan):
        if use.kernel not in KERNELS:
            continue
        rows, dtypes = max(round(use.rows), 1), use.dtypes or (DTYPES[precision],)
        where = (use.flags, device, devices.units)
        request = Request(use.kernel, devices.architecture, dtypes, tuple(use.shape.items()), rows, *where)
        sides = (*use.shape.values(), 0, 0)
        moved = float(KERNELS[use.kernel].moved_bytes(request))
        yield KernelUse(
            use.name,
            use.part,
            request,
            "",
            Rows(rows, rows, rows),
            (float(rows), sides[0], sides[1]),
            1,
            use.calls,
            product=False,
            moved_bytes=moved,
        )


def _uses(plan: Plan) -> Iterator[_Use]:
    of_part: dict[Fused, Callable[[Plan], Iterator[_Use]]] = {
        "norm": _norms, "glu": _gates, "rope": _rotations, "loss": _loss, "adamw": _update
    }  # fmt: skip
    for part in plan.layout.derived.fused:
        yield from of_part[part](plan)
    if plan.training.precision == "fp8":
        yield from _conversions(plan)


def _forward_passes(plan: Plan) -> float:
    policies = plan.layout.recompute
    return 1.0 + sum(policy in _LIGHT for policy in policies) / len(policies)


def _per_step(plan: Plan) -> float:
    """Return the mean number of calls per rank and step for one layer: micro-batches / pipeline ranks."""
    return plan.layout.derived.accumulation / plan.layout.mesh.pp


def _norms(plan: Plan) -> Iterator[_Use]:
    """Yield the kernel calls of norms over heads and over the hidden size.

    If d2 ranks cut the hidden size, norms over the hidden size are left out, as torch computes them.
    """
    layout, model, forward_passes = plan.layout, plan.model, _forward_passes(plan)
    if layout.tensor.inner == 1:
        yield from _whole_norms(plan)
    if model.qk_norm and "rope" not in layout.derived.fused:
        for name, heads, each in _heads(plan):
            width, rows = {"n": model.head_dim}, plan.tokens * heads
            yield _Use(f"{name}_norm", "forward", "norm_forward", rows, width, each * forward_passes, ("rms",))
            yield _Use(f"{name}_norm", "backward", "norm_backward", rows, width, each, ("rms",))


def _whole_norms(plan: Plan) -> Iterator[_Use]:
    layout, model = plan.layout, plan.model
    flags = ("rms",) if model.norm == "rmsnorm" else ("bias", "layer")
    rows = plan.tokens / (layout.mesh.tp if layout.tensor.sequence_norms else 1)
    width, once = {"n": model.hidden}, _per_step(plan)
    layers = model.blocks * once
    for name, extra, calls, forward in (
        ("attention_norm", (), layers, _forward_passes(plan) * layers),
        ("ffn_norm, sum", ("add",), layers, _forward_passes(plan) * layers),
        ("final_norm", (), (1 + model.predictions) * once, (1 + model.predictions) * once),
    ):
        what = tuple(sorted((*flags, *extra)))
        yield _Use(name, "forward", "norm_forward", rows, width, forward, what)
        yield _Use(name, "backward", "norm_backward", rows, width, calls, what)


def _gates(plan: Plan) -> Iterator[_Use]:
    for gemm, calls in counted(plan):
        if gemm.name == "ffn.down":
            width, flags = {"f": gemm.k}, (_KINDS[plan.model.activation],)
            # Tensor chunks split the down-projection only: the gate is computed once on all of its rows.
            chunks = 1 if plan.layout.tiles.mlp else plan.layout.tensor.chunks
            rows, each = gemm.rows.mean * chunks, calls / chunks
            yield _Use("ffn gate", "forward", "glu_forward", rows, width, each * _forward_passes(plan), flags)
            yield _Use("ffn gate", "backward", "glu_backward", rows, width, each, flags)


def _rotations(plan: Plan) -> Iterator[_Use]:
    model = plan.model
    names = ("rope_norm_forward", "rope_norm_backward") if model.qk_norm else ("rope", "rope")
    for name, heads, calls in _heads(plan):
        shape = {"n": heads, "d": model.head_dim}
        yield _Use(f"{name} turned", "forward", names[0], plan.tokens, shape, calls * _forward_passes(plan))
        yield _Use(f"{name} turned", "backward", names[1], plan.tokens, shape, calls)


def _heads(plan: Plan) -> Iterator[tuple[str, int, float]]:
    """Yield, for queries and for keys, the name, the number of heads on a rank, and the number of calls per step."""
    for gemm, calls in counted(plan):
        if gemm.name in ("attention.q", "attention.k, v"):
            name = gemm.name.removeprefix("attention.").removesuffix(", v")
            yield name, max(gemm.n // plan.model.head_dim, 1), calls / gemm.alike


def _loss(plan: Plan) -> Iterator[_Use]:
    """Yield the kernel calls on logits, which work in place; with a sharded vocabulary, two kernels do the work of one.

    If gradients are computed with the loss, further calls multiply the gradients by the gradient of the loss.
    """
    (gemm, calls) = next(one for one in counted(plan) if one[0].name == "head")
    rows, early = gemm.rows.mean, early_loss(plan)
    width = {"v": gemm.n}
    recompute = not early and rows < plan.tokens
    if plan.layout.mesh.tp == 1:
        part, flags = ("forward", ()) if recompute else ("both", ("gradient",))
        yield _Use("loss", part, "cross_entropy", rows, width, calls, flags)
    if plan.layout.mesh.tp > 1 or recompute:
        yield _Use("loss", "backward" if recompute else "both", "cross_entropy_parts", rows, width, calls)
        yield _Use("loss", "backward" if recompute else "both", "cross_entropy_gradient", rows, width, calls)
    if early:
        dtype, inner = DTYPES[plan.training.precision], {"n": gemm.k}
        wide = dtype == "float16" or (dtype == "bfloat16" and plan.tokens > WIDE_ABOVE * rows)
        each = _per_step(plan)
        yield _Use("loss: dx", "backward", "scaled", plan.tokens, inner, each, dtypes=(dtype, dtype))
        yield _Use("loss: dW", "backward", "scaled", gemm.n, inner, each, dtypes=("float32" if wide else dtype, dtype))


def _update(plan: Plan) -> Iterator[_Use]:
    mesh, layout = plan.layout.mesh, plan.layout
    shards = mesh.pp * mesh.tp * (mesh.dp_shard * mesh.cp if layout.data.zero else 1)
    elements = sum(info.elements for info in parameters(plan.model)) / shards
    yield _Use("update", "step", "adamw", elements, {}, 1.0, dtypes=("float32", "float32"))


def _conversions(plan: Plan) -> Iterator[_Use]:
    """Yield the kernel calls that convert inputs, weights and output gradients to 8 bits.

    Tensors that are read both as they are and transposed are converted to both orders at once. An input that several
    matrices share is converted once.
    """
    record = ARCHITECTURES[plan.devices.architecture]
    if record.fp8 is None:
        return
    dtypes = (DTYPES["fp8"], record.fp8)
    before = ""
    for gemm, calls in counted(plan):
        if not is_narrow(plan, gemm) or gemm.groups > 1:
            continue
        rows, forward_passes = gemm.rows.mean, _forward_passes_of_products(plan)
        if not _same_input(before, gemm.name):
            once, width, name = calls / gemm.alike, {"k": gemm.k}, f"{gemm.name}: x"
            yield _Use(name, "forward", "fp8_quantise", rows, width, once * forward_passes, ("plain",), dtypes)
            yield _Use(name, "backward", "fp8_quantise", rows, width, once, ("turned",), dtypes)
        before = gemm.name
        yield from _of_gradient_and_weight(gemm, calls, forward_passes, dtypes)


def _of_gradient_and_weight(gemm: Gemm, calls: float, forward_passes: float, dtypes: tuple[str, ...]) -> Iterator[_Use]:
    rows, inner, outer, name = gemm.rows.mean, {"k": gemm.k}, {"k": gemm.n}, gemm.name
    kernel = "fp8_quantise"
    yield _Use(f"{name}: W", "forward", kernel, gemm.n, inner, calls * forward_passes, ("plain", "square"), dtypes)
    yield _Use(f"{name}: dy", "backward", kernel, rows, outer, calls, ("plain", "turned"), dtypes)
    yield _Use(f"{name}: W", "backward", kernel, gemm.n, inner, calls, ("square", "turned"), dtypes)


def _same_input(before: str, name: str) -> bool:
    return (before, name) in {("attention.q", "attention.k, v"), ("attention.q_a", "attention.kv_a")}


def _forward_passes_of_products(plan: Plan) -> float:
    policies = plan.layout.recompute
    return 1.0 + sum(policy in ("keep_attention", "full") for policy in policies) / len(policies)

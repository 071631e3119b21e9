"""Seconds of element-wise kernels in a layer, and the gaps between kernels."""

from __future__ import annotations

import numpy as np

from partool.catalog.bandwidth import STREAM_SHARE
from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts
from partool.cost.kinds import Kind
from partool.cost.silicon.products import quantises, scale_s
from partool.cost.time import eager
from partool.cost.time.gemm import in_tiles
from partool.cost.traffic.messages import tokens
from partool.spec.training import Fused
from partool.work.base import Workload
from partool.work.stack import FUSED_CASTS

_KERNEL_GAP_S = 5e-6
"""Minimum seconds of a small kernel plus the gap after it."""
_FUSED_PASSES = 1.1
"""Memory traffic of a fused kernel or a compiled block, relative to reading each input and writing each result once."""
_ROUTED: tuple[Fused, Fused] = ("norm", "glu")
"""Parts of a block that stand for the copies of rows and for the activations of experts."""


def elementwise_s(job: Workload, layouts: Layouts, kind: Kind, *, backward: bool) -> Column:
    """Return the seconds of norms, residuals, rotary positions and activations.

    Fused kernels read their inputs and write their result once: two norms and two residual sums move 10 hidden widths
    per token forward, the rotation moves queries and keys twice, the activation its inputs and result. The backward
    pass moves about 1.7 times as many bytes. Eager kernels move more (``Stack.elementwise``); on a CPU
    :func:`partool.cost.time.eager.traffic` counts both passes. Tensor ranks shard everything except the residual
    stream, which is sharded only with sequence parallelism.
    """
    model, stack, ranks = job.model, job.stack, tensor_shares.outer(layouts)
    stream = 10.0 * model.hidden / tensor_shares.stream(job, layouts)
    queries, keys = tensor_shares.heads(model, layouts.tp)
    rotated = 2.0 * (queries + keys) * model.head_dim if model.position == "rope" else 0.0
    gates = (3.0 if model.gated else 2.0) * stack.activation_passes
    inner: Column = tensor_shares.width(model.ffn_hidden, ranks)
    chosen: Column = 0.0
    if kind.moe and model.moe:
        width = tensor_shares.width(model.moe.ffn_hidden, ranks)
        inner, chosen = model.moe.shared_experts * width, model.moe.top_k * width
    parts: tuple[tuple[Column, Fused], ...] = ((stream, "norm"), (rotated, "rope"), (gates * inner, "glu"))
    moves = sum(width * _traffic(job, part, backward=backward) for width, part in parts)
    moves = moves + (_routed(job, layouts, gates * chosen, backward=backward) if kind.moe else 0.0)
    elements = moves * (1.7 if backward and job.devices.backend != "cpu" else 1.0)
    scaling: Column = 0.0
    if quantises(job):
        rows = tokens(job, layouts)
        of_inner = np.where(np.asarray(inner) > 0, scale_s(job, rows, inner), 0.0)
        scaling = 2.0 * scale_s(job, rows, model.hidden) + of_inner
    if job.precision == "fp8":
        # Inputs of products are read, scaled and written in fp8, in both orientations for the backward pass.
        casts = max(stack.fp8_casts - FUSED_CASTS, 0.0) if quantises(job) else stack.fp8_casts
        elements = elements + casts * (2.0 * model.hidden + inner)
    elements = elements + _added(job, layouts, kind, backward=backward)
    moved = elements * tokens(job, layouts) * job.compute_bytes
    # Gate, up projection, activation and their product are new tensors; backward, so are their gradients.
    inside = (inner + chosen) * tokens(job, layouts) * job.compute_bytes
    one = np.where(in_tiles(job, layouts) | kind.moe, 0.0, inside)
    return moved / stream_bytes_per_s(job) + scaling + eager.mapped_s(job, one, (4.0 if model.gated else 2.0) * inside)


def _traffic(job: Workload, part: Fused, *, backward: bool) -> float:
    """Return the memory traffic of a block's ``part``, relative to one read and write; on a CPU nothing is fused."""
    if job.devices.backend == "cpu" or (part == "glu" and job.model.activation == "swiglu_clamped"):
        return eager.traffic(job.model, part, backward=backward)
    passes = job.stack.elementwise
    return min(passes, _FUSED_PASSES) if part in job.stack.fused else passes


def _routed(job: Workload, layouts: Layouts, inner: Column, *, backward: bool) -> Column:
    """Return the elements per token that copies to and from experts, and their activations, read and write.

    Tokens are copied into the experts' order and back, weighted and summed, and on the way to other ranks once more. A
    device's experts are priced with one pass over rows and ``inner`` elements; eager code makes more.
    """
    if job.model.moe is None:
        return 0.0
    rows = job.model.moe.top_k * layouts.etp * job.model.hidden / layouts.tp
    copies, activations = (_traffic(job, part, backward=backward) for part in _ROUTED)
    if job.devices.backend == "cpu":
        return 7.0 * rows * copies + inner * activations
    sends = np.where(np.asarray(layouts.ep) > 1, 3.0 * copies, 0.0)
    return rows * (4.0 * max(copies - 1.0, 0.0) + sends) + inner * max(activations - 1.0, 0.0)


def _added(job: Workload, layouts: Layouts, kind: Kind, *, backward: bool) -> Column:
    """Return the elements per token that scaling by sinks, and adding the biases of experts, read and write.

    A result is scaled in one pass, and read with its gradient for that of the sinks. A bias is copied to the rows of
    its expert and added to them (5); its gradient is a product that reads the rows' (1).
    """
    model = job.model
    scaled = 2.0 * tensor_shares.heads(model, layouts.tp)[0] * model.head_dim if model.sinks else 0.0
    if not kind.moe or model.moe is None or not model.moe.bias:
        return scaled
    width = tensor_shares.width(model.moe.ffn_hidden, tensor_shares.outer(layouts))
    rows = (1 + model.gated) * width + model.hidden / np.where(np.asarray(layouts.ep) > 1, layouts.tp, 1)
    return scaled + (1.0 if backward else 5.0) * model.moe.top_k * rows


def stream_bytes_per_s(job: Workload) -> float:
    """Return the memory rate of element-wise kernels, in bytes per second."""
    return STREAM_SHARE[job.devices.backend] * job.devices.memory_bytes_per_s


def gap_s(job: Workload) -> float:
    """Return the device's idle seconds between two kernels; on a CPU they are part of the host's time per operator."""
    return 0.0 if job.devices.backend == "cpu" else _KERNEL_GAP_S

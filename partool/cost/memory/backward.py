"""Bytes by which a layer's backward pass exceeds what the layer saves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partool.cost.case import Column, Layouts
from partool.cost.kinds import trained_matrices
from partool.cost.memory.activations import micro_batch_tokens, widths
from partool.cost.memory.stacks import MemoryStack
from partool.cost.memory.transient import attention_exchange_bytes
from partool.cost.time.gemm import in_tiles
from partool.work.base import Workload
from partool.work.traced import TracedKind, coefficients


class BackwardBytes(NamedTuple):
    """Bytes beside what the layer saves without recomputation; each field is a column."""

    backward_peak_bytes: Column
    """At the fullest moment; where ranks share the layer's experts, while the experts' gradients are computed."""
    expert_reduction_bytes: Column = 0.0
    """When nothing but their gradients is left of experts that ranks share; without these gradients."""
    after_experts_bytes: Column = 0.0
    """While the backward pass of the rest of the layer follows theirs, without their gradients."""
    recompute_end_bytes: Column = 0.0
    """At the end of the forward pass, if it is run again."""


def dense_backward(job: Workload, layouts: Layouts, saved_bytes: Column) -> BackwardBytes | None:
    """Return what a dense layer's backward pass takes; None if what the layer saves is not traced.

    The fullest moment is the end of the gate's backward pass: the product's gradient and those of gate and up exist,
    the product itself is freed, and so is the residual stream's gradient that arrived; or the end of attention's
    backward pass, when all tensors of the feed-forward network are freed, but the gradients of its matrices exist, and
    the buffers of exchanges between ranks; or the backward pass of a norm that is not fused. ``saved_bytes`` is what
    the layer saves without recomputation.
    """
    m, small = job.model, job.compute_bytes
    fused = job.stack.fused
    eager, compiled = (coefficients(job.trace, m, job.precision, TracedKind(each, "none", fused)) for each in (0, 1))
    if eager is None or compiled is None:
        return None
    sizes, tokens = widths(job, layouts, 0), micro_batch_tokens(job, layouts)
    saved: Column = np.where(layouts.compiled == 1, compiled.token["inner"], eager.token["inner"])
    inner_count = inner_tensors(job, saved)
    matrix = trained_matrices(m, job.frozen, moe=False) * m.hidden * sizes.inner
    share = np.where(in_tiles(job, layouts), layouts.mlp_tile_tokens * layouts.cp / job.sequence_length, 1.0)
    network = small * inner_count * np.minimum(1.0, share) - np.where(in_tiles(job, layouts), 0.0, saved)
    gate = tokens * (sizes.inner * network + small * sizes.hidden) + small * matrix
    gradients = small * (sizes.attention - sizes.latent)
    freed = np.where(in_tiles(job, layouts), 0.0, saved) * sizes.inner + small * sizes.hidden
    attention = tokens * (gradients - freed) + small * (2 + m.gated) * matrix
    attention = attention + attention_exchange_bytes(job, layouts)
    peak_bytes = np.maximum(gate, attention)
    if "norm" in fused or m.norm != "rmsnorm":
        return BackwardBytes(peak_bytes)
    # A norm of several operators has five wide tensors of the model's width at once; the wide input still exists.
    wide = max(small, 4)
    matrices = small * (2 + m.gated) * matrix
    second = tokens * (sizes.hidden * (5 * wide - small) - np.where(in_tiles(job, layouts), 0.0, saved) * sizes.inner)
    first = tokens * sizes.hidden * (6 * wide + small) - saved_bytes
    first = first + trained_matrices(m, job.frozen, moe=False) * small * m.hidden * sizes.attention
    norms = matrices + np.maximum(second, first)
    return BackwardBytes(np.where(layouts.compiled == 1, peak_bytes, np.maximum(peak_bytes, norms)))


def inner_tensors(job: Workload, saved: Column) -> Column:
    """Return the number of tensors of the inner width at the end of the gate's backward pass.

    ``saved`` are the bytes per inner element that the layer saves. Operators that are not fused keep the activated
    gate, too, until the product's gradient has been computed. The clamped gate has its slope, which is not saved,
    and a mask.
    """
    masks = 1.0 / job.compute_bytes
    clamped = job.model.activation == "swiglu_clamped"
    more = 1.0 + masks if clamped else np.where(saved > 3 * job.compute_bytes, 1.0, 0.0)
    return 3.0 + 2.0 * job.model.gated + more


def gradients_per_token(job: Workload, layouts: Layouts, stack: MemoryStack, kind: int) -> Column:
    """Return the peak bytes per token of activation gradients in a layer's backward pass.

    In the feed-forward network, the gradients of the block's result, of the product, and (unless the kernel writes in
    place) of gate and up exist at once. In attention, the gradients of queries, keys, values and the result exist at
    once.
    """
    sizes = widths(job, layouts, kind)
    parts: Column = 1 if stack.in_place_gates or not job.model.gated else 3
    # A tiled network has these gradients for one tile at a time.
    share = np.minimum(1.0, layouts.mlp_tile_tokens * layouts.cp / job.sequence_length)
    parts = np.where(in_tiles(job, layouts), parts * share, parts)
    return job.compute_bytes * (np.maximum(parts * sizes.inner, sizes.attention) + sizes.routed + 2 * sizes.hidden)

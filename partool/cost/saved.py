"""Bytes that autograd keeps of one layer, per token, by recompute policy.

Counted operator by operator, as Korthikanti et al. count them for GPT (arXiv 2205.05198, section 4); sizes follow
grouped queries, latent attention, gated networks and experts. Tensors of the width of the model are cut by tensor
parallelism only where norms and residuals are sharded too ("sequence parallel" in Megatron's words).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost.case import Column, Job, Layouts
from partool.cost.held import MOE
from partool.cost.memory_stacks import MemoryStack

IMBALANCE = 1.1
"""Tokens of the fullest expert rank against an even share: 1.0 to 1.3 with a balancing loss."""


@dataclass(frozen=True)
class Widths:
    """Elements per token on one rank of the tensors of one layer; each field is a column."""

    hidden: Column
    """The residual stream."""
    attention: Column
    """Queries, keys, values and the result, and with latent attention what they are projected from."""
    query: Column
    value: Column
    result: Column
    scores: Column
    """Of unfused attention: every head's row over the sequence."""
    sums: Column
    """Heads: one logarithm of a sum each (fused attention)."""
    inner: Column
    """Inner width of the feed-forward network; with experts of those that a token visits."""
    routed: Column
    """Tokens' hidden states sent to experts and back, with the router's scores."""


def widths(job: Job, layouts: Layouts, stack: MemoryStack, kind: int) -> Widths:
    """Return the widths of a layer of a kind."""
    m, tp = job.model, layouts.tp
    hidden = m.hidden / np.where(job.stack.sequence_parallel, tp, 1)
    latent: Column = 0.0
    if m.mla:
        query = key = m.heads * (m.mla.nope_head_dim + m.mla.rope_head_dim)
        value = result = m.heads * m.mla.v_head_dim
        # The latent vectors before and after their norms: the same on every tensor rank.
        latent = 2 * (m.mla.q_rank or 0) + 2 * m.mla.kv_rank + m.mla.rope_head_dim
    else:
        query = result = m.heads * m.head_dim
        heads = m.heads if stack.expanded_keys else np.maximum(m.kv_heads, tp)
        key = value = heads * m.head_dim
    fused = job.stack.attention != "unfused"
    inner, routed = m.ffn_hidden / tp, 0.0
    if kind == MOE and m.moe:
        visits = m.moe.top_k * IMBALANCE
        inner = (visits + m.moe.shared_experts) * m.moe.ffn_hidden / tp
        routed = 2 * visits * m.hidden + 2 * m.moe.experts
    return Widths(
        hidden=hidden,
        attention=(query + key + value + result) / tp + latent,
        query=query / tp,
        value=value / tp,
        result=result / tp,
        scores=0.0 if fused else m.heads / tp * job.sequence_length,
        sums=m.heads / tp if fused else 0.0,
        inner=inner,
        routed=routed,
    )


def saved_per_token(job: Job, layouts: Layouts, stack: MemoryStack, kind: int, policy: int) -> Column:
    """Return the bytes per token of one layer of a kind under a policy (index in :data:`RECOMPUTE`)."""
    sizes = widths(job, layouts, stack, kind)
    small = job.compute_bytes
    if policy == 3:
        return sizes.hidden * small
    if policy == 2 and stack.selective != "attention":
        return _matmuls(job, stack, sizes)
    whole = _whole(job, layouts, stack, sizes)
    if policy == 0:
        return whole
    return whole - _core(job, stack, sizes)


def _whole(job: Job, layouts: Layouts, stack: MemoryStack, sizes: Widths) -> Column:
    """Everything: the operators' inputs, or what the compiler keeps of them."""
    small = job.compute_bytes
    eager = (
        2 * _norm(job, stack, sizes)
        + small * (sizes.attention + _products(job, stack) * sizes.inner + sizes.routed)
        + (2 * sizes.hidden if stack.dropout else 0.0)
    )
    # The compiler keeps what matrix products and attention need and redoes what is element-wise between them.
    gates = 2 if job.model.gated else 1
    compiled = small * (2 * sizes.hidden + sizes.attention + gates * sizes.inner + sizes.routed)
    always = 1 if stack.recompiles else layouts.compiled
    return np.where(always == 1, compiled, eager) + _core(job, stack, sizes)


def _core(job: Job, stack: MemoryStack, sizes: Widths) -> Column:
    """Return what the core of attention keeps besides its inputs and its result."""
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    return sizes.scores * (2 * small + 1 if stack.dropout else small) + sizes.sums * wide


def _matmuls(job: Job, stack: MemoryStack, sizes: Widths) -> Column:
    """Return the bytes of the block's input, of matrix products' results and of attention's."""
    small = job.compute_bytes
    gates = 2 if job.model.gated else 1
    sums = sizes.sums * max(small, 4)
    if stack.selective == "half-matmul":
        # Of q, k, v, o, (gate,) up, down every other one from the first.
        down = 1 if job.model.gated else 0
        kept = (1 + down) * sizes.hidden + sizes.query + sizes.value + sizes.result + sizes.inner + sizes.routed
        return small * kept + sums
    return small * (3 * sizes.hidden + sizes.attention + gates * sizes.inner + sizes.routed) + sums


def _products(job: Job, stack: MemoryStack) -> int:
    """Return the tensors of the inner width that are kept."""
    if job.model.gated:
        return 2 + stack.gate_products
    return 1 if job.model.activation == "relu" else 2


def _norm(job: Job, stack: MemoryStack, sizes: Widths) -> Column:
    """Return the bytes per token that a norm keeps: its input, wide where it is eager, and its results."""
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    if job.model.norm == "layernorm":
        return 2 * sizes.hidden * small + 2 * wide
    return sizes.hidden * (stack.norm_passes * wide + 2 * small) + wide


def norm_per_token(job: Job, layouts: Layouts, stack: MemoryStack) -> Column:
    """Return the bytes per token that the final norm keeps."""
    return _norm(job, stack, widths(job, layouts, stack, 0))


def gradients_per_token(job: Job, layouts: Layouts, stack: MemoryStack, kind: int) -> Column:
    """Return the bytes per token of the gradients of activations that exist at once in a layer's backward pass."""
    sizes = widths(job, layouts, stack, kind)
    gates = 2 if job.model.gated else 1
    return job.compute_bytes * (
        np.maximum((gates + 1) * sizes.inner, sizes.attention) + sizes.routed + 2 * sizes.hidden
    )

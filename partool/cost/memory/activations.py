"""Bytes that autograd saves for one layer, by recompute policy.

For partool's runtime these bytes are traced (:mod:`partool.work.traced`). For other code bases, for experts and for
rare kinds of models the bytes are counted operator by operator, as Korthikanti et al. count them for GPT (arXiv
2205.05198, section 4), but also with grouped queries, latent attention, gated networks and experts. Tensor parallelism
shards tensors of the model's width only in two cases: norms and residuals are sharded too (Megatron's "sequence
parallel"), or tensor parallelism has two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import (
    FULL,
    HALVED,
    KEEP_ATTENTION,
    ONE_AT_THE_END,
    RECOMPUTE,
    SELECTIVE,
    Column,
    Layouts,
    Mask,
    among,
)
from partool.cost.memory.rank_parameters import MOE
from partool.cost.memory.stacks import MemoryStack
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time import adapter
from partool.cost.time.gemm import in_tiles
from partool.cost.traffic.expert_rows import rows_back, rows_here
from partool.cost.traffic.tensor import keeps_gathered
from partool.work.base import Workload
from partool.work.traced import Coefficients, coefficients
from partool.work.traced import TracedKind as Traced

NONE, ATTENTION = RECOMPUTE.index("none"), RECOMPUTE.index("attention")


@dataclass(frozen=True)
class LayerWidths:
    """Number of elements per token of the tensors of one layer on one rank; each field is a column."""

    hidden: Column
    """Width of the residual stream."""
    query: Column
    key: Column
    value: Column
    result: Column
    latent: Column
    """Number of elements of the compressed queries, keys and values of latent attention."""
    heads: Column
    kv_heads: Column
    scores: Column
    """Number of attention scores of one token, over the whole sequence and all heads."""
    inner: Column
    """Inner width of the feed-forward network; with experts, the sum over the experts that a token visits."""
    routed: Column
    """Number of elements of the router's scores, and of the hidden states that are sent to experts and back."""

    @property
    def attention(self) -> Column:
        """Number of elements of queries, keys, values and result, plus the compressed vectors of latent attention."""
        return self.query + self.key + self.value + self.result + self.latent


def micro_batch_tokens(job: Workload, layouts: Layouts) -> Column:
    """Return the number of tokens that one rank processes in one forward pass."""
    return layouts.micro_batch * sequence_shares.tokens(job, layouts)


def widths(job: Workload, layouts: Layouts, kind: int) -> LayerWidths:
    """Return the widths of a layer of ``kind``."""
    job = job.of_shape(max(kind - MOE, 0))
    m, ranks = job.model, tensor_shares.outer(layouts)
    latent: Column = 0.0
    queries, keys = tensor_shares.heads(m, layouts.tp)
    # With two dimensions, the result is all-gathered over the inner ranks for the output matrix.
    gathered, _ = tensor_shares.heads(m, ranks)
    if m.mla:
        head = m.mla.nope_head_dim + m.mla.rope_head_dim
        query, key, value, result = queries * head, queries * head, queries * m.mla.v_head_dim, m.mla.v_head_dim
        # The latent vectors before and after their norms are the same on every tensor rank.
        latent = 2 * (m.mla.q_rank or 0) + 2 * m.mla.kv_rank + m.mla.rope_head_dim
    else:
        query, result = queries * m.head_dim, m.head_dim
        key = value = keys * m.head_dim
    inner: Column = tensor_shares.width(m.ffn_hidden, ranks)
    routed: Column = 0.0
    if kind >= MOE and m.moe:
        visits: Column = m.moe.top_k * rows_here(job, layouts)
        inner = (visits + m.moe.shared_experts) * tensor_shares.width(m.moe.ffn_hidden, ranks)
        # Each part of an expert is sent the expert's tokens; the parts of its inner width are as wide as the whole.
        routed = 2 * visits * layouts.etp * m.hidden + 2 * m.moe.experts
    return LayerWidths(
        hidden=m.hidden / tensor_shares.stream(job, layouts),
        query=query,
        key=key,
        value=value,
        result=result * gathered,
        latent=latent,
        heads=queries,
        kv_heads=keys,
        scores=queries * job.sequence_length,
        inner=inner,
        routed=routed,
    )


def saved_by_layer(job: Workload, layouts: Layouts, stack: MemoryStack, kind: int, policy: int) -> Column:
    """Return the bytes that a layer of ``kind`` saves per micro-batch under ``policy`` (index in :data:`RECOMPUTE`)."""
    job, kind = job.of_shape(max(kind - MOE, 0)), min(kind, MOE)
    saved_bytes = _without_adapter(job, layouts, stack, kind, policy)
    if job.model.adapter is None or policy in (FULL, KEEP_ATTENTION):
        return saved_bytes
    added = adapter.saved_per_token(job, layouts, kind == MOE, products=policy == SELECTIVE)
    return saved_bytes + added * micro_batch_tokens(job, layouts)


def _without_adapter(job: Workload, layouts: Layouts, stack: MemoryStack, kind: int, policy: int) -> Column:
    """Return :func:`saved_by_layer` of a model without an adapter."""
    tokens = micro_batch_tokens(job, layouts)
    if stack.traced:
        traced_bytes = _traced(job, layouts, policy, tokens, kind)
        if traced_bytes is not None:
            routed_per_token = _routed(job, layouts, policy) if kind == MOE else 0.0
            return traced_bytes + (_gathered(job, layouts, policy) + routed_per_token) * tokens
    sizes = widths(job, layouts, kind)
    small = job.compute_bytes
    if policy == FULL:
        return sizes.hidden * small * tokens
    if policy == KEEP_ATTENTION:
        return ((sizes.hidden + sizes.result) * small + _core(job, stack, sizes)) * tokens
    compiled = 1 if stack.recompiles else 0 if stack.traced and kind == MOE else layouts.compiled
    if policy == SELECTIVE and stack.selective != "attention":
        return _matmuls(job, stack, sizes, compiled) * tokens
    per_token: Column = np.where(compiled == 1, _compiled(job, stack, sizes), _eager(job, stack, sizes))
    return (per_token + (_core(job, stack, sizes) if policy == NONE else 0.0)) * tokens


def _routed(job: Workload, layouts: Layouts, policy: int) -> Column:
    """Return the bytes per token of what only a layer with experts saves: its router's tensors, and rows of tokens.

    A rank keeps the rows that its experts multiply, and the results that come back to its tokens; recomputation keeps
    what travelled, and the results of products. Tensor ranks route shares of the tokens if ranks share experts. The
    norm's result, which a dense network keeps, is not kept where neither shared experts nor the router work on it.
    """
    moe, hidden = job.model.moe, job.model.hidden
    assert moe is not None, "a dense model"
    shared = np.asarray(layouts.ep) > 1
    sent_rows: Column = moe.top_k * np.asarray(layouts.etp, dtype=float)
    arrived_rows: Column = sent_rows * rows_here(job, layouts)
    sent_rows = sent_rows * rows_back(job, layouts)
    rows_of_policy = {
        NONE: arrived_rows + sent_rows,
        ATTENTION: arrived_rows + sent_rows,
        SELECTIVE: np.where(shared, 2 * arrived_rows + sent_rows, arrived_rows),
        KEEP_ATTENTION: np.where(shared, arrived_rows + sent_rows, 0.0),
    }.get(policy, 0.0)
    row_bytes = job.compute_bytes * hidden * rows_of_policy / np.where(shared, layouts.tp, 1)
    if policy not in (NONE, ATTENTION):
        return row_bytes
    kept = moe.shared_experts > 0 or job.compute_bytes >= 4  # by shared experts, or by a router that needs no copy
    norm = 0.0 if kept else job.compute_bytes * hidden / tensor_shares.stream(job, layouts)
    return row_bytes + router_per_token(job, layouts) + _residual(job, layouts) - norm


def _residual(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes per token that weighing routed against shared experts saves: both results, and a wide copy."""
    moe = job.model.moe
    assert moe is not None, "a dense model"
    if not moe.residual:
        return 0.0
    copied_bytes = 4 * job.model.hidden if job.compute_bytes < 4 else 0
    return weighed_per_token(job, layouts) + copied_bytes / np.where(np.asarray(layouts.ep) > 1, layouts.tp, 1)


def weighed_per_token(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes per token of the results that residual experts weigh; tensor ranks have shares of routed ones.

    They are freed before the experts' backward pass begins.
    """
    moe, result_bytes = job.model.moe, job.compute_bytes * job.model.hidden
    if moe is None or not moe.residual:
        return 0.0
    return result_bytes + result_bytes / np.where(np.asarray(layouts.ep) > 1, layouts.tp, 1)


def router_per_token(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes per token that the router of a layer with experts saves.

    It works in a wide type, on a copy of the tokens if their own type is narrow. Tensor ranks route shares of the
    tokens if ranks share experts.
    """
    moe, wide = job.model.moe, max(job.compute_bytes, 4)
    assert moe is not None, "a dense model"
    copied_bytes = wide * job.model.hidden if wide > job.compute_bytes else 0
    saved_bytes = copied_bytes + wide * moe.experts * (1 + (moe.aux_loss > 0) + (moe.z_loss > 0))
    return saved_bytes / np.where(np.asarray(layouts.ep) > 1, layouts.tp, 1)


def _traced(job: Workload, layouts: Layouts, policy: int, tokens: Column, kind: int = 0) -> Column | None:
    """Return the traced bytes that the runtime's blocks save; None if no traced data exist."""
    m = job.model
    fused = job.stack.fused
    eager = coefficients(job.trace, m, job.precision, Traced(0, RECOMPUTE[policy], fused))
    compiled = coefficients(job.trace, m, job.precision, Traced(1, RECOMPUTE[policy], fused))
    if eager is None or compiled is None:
        return None
    sizes = widths(job, layouts, kind)
    sliding = m.layer_types.count("sliding") / m.layers if m.window and job.sequence_length > m.window else 0.0
    without_copies = 1.0 if m.sinks else sliding
    key = sizes.key
    if job.devices.backend != "cpu":
        # Off the CPU only the flash kernel accepts fewer key heads than query heads, and it takes no wide types;
        # layers with windows or sinks use an operator of partool that keeps no copies. Recomputation copies keys anew.
        copied = 1.0 - without_copies if policy == NONE and job.precision in ("fp32", "fp64") else 0.0
        key = key + copied * (sizes.query - key)

    # Results of attention along columns are reordered to the sequence's order for the output matrix.
    column_share = m.layer_types.count("column") / m.layers if policy == NONE else 0.0
    # A tiled network keeps only its input; the result of its last product is kept only by selective recomputation.
    tiled = in_tiles(job, layouts)
    dropped = np.where(tiled, job.compute_bytes * sizes.hidden, 0.0) if policy == SELECTIVE else 0.0

    def total(traced: Coefficients) -> Column:
        per_token = (
            traced.token["hidden"] * sizes.hidden
            + (traced.token["query"] + column_share * job.compute_bytes) * sizes.query
            + traced.token["key"] * key
            + traced.token["inner"] * np.where(tiled, 0.0, sizes.inner)
            + traced.token["heads"] * sizes.heads
            + traced.token["kv_heads"] * sizes.kv_heads
            + traced.token["scores"] * sizes.scores
            + traced.token["one"]
            + _latent(job, layouts, traced, sizes)
        )
        return (per_token - dropped) * tokens + traced.layer

    if kind == MOE:
        return total(eager)  # compiled or not: dry runs of both keep about as much
    return np.where(layouts.compiled == 1, total(compiled), total(eager))


def _latent(job: Workload, layouts: Layouts, traced: Coefficients, sizes: LayerWidths) -> Column:
    """Return the traced bytes per token of tensors that only latent attention has.

    Down-projections and norms of latents work on the same tokens as norms of the residual stream.
    """
    mla = job.model.mla
    if mla is None:
        return 0.0
    latent_bytes = (
        traced.token["q_rank"] * (mla.q_rank or 0)
        + traced.token["kv_rank"] * mla.kv_rank
        + traced.token["latent"] * (mla.kv_rank + mla.rope_head_dim)
        + traced.token["rotary"] * mla.rope_head_dim
    )
    expanded = sizes.heads * (mla.nope_head_dim + mla.v_head_dim)
    heads = traced.token["value"] * sizes.value + traced.token["expanded"] * expanded
    return heads + latent_bytes / tensor_shares.stream(job, layouts)


def tile_bytes(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes of tensors that a backward pass rebuilds per tile of tokens, plus those of weight gradients."""
    traced = coefficients(job.trace, job.model, job.precision, Traced(0, "none", job.stack.fused))
    if traced is None or not np.any(np.asarray(layouts.mlp_tile_tokens)):
        return 0.0
    sizes, small = widths(job, layouts, 0), job.compute_bytes
    rebuilt = traced.token["inner"] * sizes.inner * layouts.mlp_tile_tokens * layouts.micro_batch
    weights = (2 + job.model.gated) * job.model.hidden * sizes.inner * (small + max(small, 4))
    return np.where(in_tiles(job, layouts), rebuilt + weights, 0.0)


def _gathered(job: Workload, layouts: Layouts, policy: int) -> Column:
    """Return the bytes per token that a layer keeps as full hidden states although tensor ranks shard the sequence.

    A layer that keeps all-gathered tensors has the full inputs of both pairs of matrices; in latent attention these are
    latents, and the rotary part of keys. Selective recomputation keeps the results of collectives, which are the
    gathered inputs, and the results of second matrices before the reduce-scatter.
    """
    hidden, mla = job.model.hidden, job.model.mla
    rotary = 0 if mla is None else mla.rope_head_dim
    inputs = hidden + (hidden if mla is None else (mla.q_rank or hidden) + mla.kv_rank)
    more = (1.0 - 1.0 / tensor_shares.stream(job, layouts)) * job.compute_bytes
    kept = np.where(policy == FULL, 0.0, inputs * keeps_gathered(job, layouts))
    kept = np.where(policy == SELECTIVE, inputs + rotary + 2.0 * hidden, kept)
    return np.where(np.asarray(layouts.sequence_norms) == 1, kept * more, 0.0)


def _eager(job: Workload, stack: MemoryStack, sizes: LayerWidths) -> Column:
    """Return the bytes per token of inputs and results that eager operators keep; the core of attention is excluded."""
    small = job.compute_bytes
    masks = 2 * sizes.hidden if stack.dropout else 0.0
    expanded = 2 * (sizes.query - sizes.key) if stack.expanded_keys else 0.0
    inner = _products(job, stack) * sizes.inner
    return 2 * _norm(job, stack, sizes) + small * (sizes.attention + expanded + inner + sizes.routed) + masks


def _compiled(job: Workload, stack: MemoryStack, sizes: LayerWidths) -> Column:
    """Return the bytes per token that a compiler's partitioner keeps; the core of attention is excluded.

    The partitioner keeps the inputs of matrix products, tensors that attention needs, and the sums of norms (traced
    from torch.compile).
    """
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    expanded = 2 * (sizes.query - sizes.key) if stack.expanded_keys else 0.0
    # ReLU keeps its result and a mask of one byte; other activations keep their input and the last product's input.
    tensors = 3 if job.model.gated else 1 + (1 / small if job.model.activation == "relu" else 1)
    inner = tensors * sizes.inner
    return small * (4 * sizes.hidden + sizes.attention + expanded + inner + sizes.routed) + 2 * wide


def _core(job: Workload, stack: MemoryStack, sizes: LayerWidths) -> Column:
    """Return the bytes per token that the core of attention keeps besides its inputs and its result."""
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    if job.stack.attention == "unfused":
        return sizes.scores * (2 * small + 1 if stack.dropout else small)
    return sizes.heads * wide


def _matmuls(job: Workload, stack: MemoryStack, sizes: LayerWidths, compiled: Column) -> Column:
    """Return the bytes per token of the block's input and of the results of matrix products and attention."""
    small = job.compute_bytes
    gates = 2 if job.model.gated else 1
    sums = sizes.heads * max(small, 4)
    # A compiler drops the last product's result, which the backward pass does not need; eager selection keeps it.
    last: Column = np.where(compiled == 1, 0, 1)
    if stack.selective == "half-matmul":
        # Of the products q, k, v, o, (gate,) up, down, every second product's result is kept, starting with the first.
        last = last if job.model.gated else 0
        kept = (1 + last) * sizes.hidden + sizes.query + sizes.value + sizes.result + sizes.inner
    else:
        kept = (2 + last) * sizes.hidden + sizes.attention + gates * sizes.inner
    return small * (kept + sizes.routed) + sums


def _products(job: Workload, stack: MemoryStack) -> int:
    """Return the number of tensors of the inner width that eager operators keep."""
    if job.model.gated:
        return 2 + stack.gate_products
    return 1 if job.model.activation == "relu" else 2


def _norm(job: Workload, stack: MemoryStack, sizes: LayerWidths) -> Column:
    """Return the bytes per token of a norm's saved input (in eager mode in float32 or float64) and saved results."""
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    if job.model.norm == "layernorm":
        return 2 * sizes.hidden * small + 2 * wide
    return sizes.hidden * (stack.norm_passes * wide + 2 * small) + wide


def norm_per_token(job: Workload, layouts: Layouts, stack: MemoryStack) -> Column:
    """Return the bytes per token that the final norm keeps.

    A fused norm keeps its input and one number; its result is kept by the head unless a fused loss has computed the
    head's gradient already.
    """
    sizes, small = widths(job, layouts, 0), job.compute_bytes
    unfused_bytes = _norm(job, stack, sizes)
    if not stack.traced:
        return unfused_bytes
    result = sizes.hidden * small
    kept = np.where("norm" in job.stack.fused, 2 * result + max(small, 4), unfused_bytes)
    return kept - np.where(early_loss(job, layouts), result, 0.0)


def early_loss(job: Workload, layouts: Layouts) -> Mask:
    """Return True where the loss computes its gradients in the forward pass (``LossKernels.early`` of the runtime)."""
    if "loss" not in job.stack.fused:
        return False
    backward_follows: Mask = (np.asarray(layouts.pp) == 1) | among(layouts.schedule, ONE_AT_THE_END)
    return backward_follows & ~np.asarray(among(layouts.schedule, HALVED) & (np.asarray(layouts.pp) > 1))

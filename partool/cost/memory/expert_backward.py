"""Bytes that the backward pass of a layer with experts holds, in partool's runtime."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import BY_NODE, Column, Layouts, among
from partool.cost.memory.activations import LayerWidths, micro_batch_tokens, router_per_token, weighed_per_token, widths
from partool.cost.memory.backward import BackwardBytes, inner_tensors
from partool.cost.memory.rank_parameters import MOE
from partool.cost.memory.transient import attention_exchange_bytes
from partool.cost.traffic.expert_rows import rows_back, rows_here
from partool.cost.traffic.node_visits import nodes_of_token
from partool.work.base import Workload
from partool.work.traced import TracedKind, coefficients


class _Rows(NamedTuple):
    """Bytes of tensors of the routed tokens; each field is a column."""

    arrived: Column
    """Of the hidden states that a rank's experts work on."""
    sent: Column
    """Of the hidden states that a rank's tokens send to their experts."""
    inner: Column
    """Of one tensor of the experts' inner width."""
    kept: Column
    """Of all tensors of the inner width that the experts save."""
    matrices: Column
    """Of the gradients of the experts' matrices, in the compute type."""


def experts_backward(job: Workload, layouts: Layouts, saved_bytes: Column) -> BackwardBytes | None:
    """Return what the backward pass of a layer with experts takes; None if what such layers save is not traced.

    ``saved_bytes`` is what the layer saves without recomputation. The experts' part begins with the gradients of rows
    that travel (:mod:`partool_runtime.parallel.expert.dispatch`) and ends when the gradients of the rows by gate and up
    exist with all of the matrices.
    """
    traced = coefficients(job.trace, job.model, job.precision, TracedKind(0, "none", job.stack.fused))
    if traced is None:
        return None
    sizes, tokens, small = widths(job, layouts, MOE), micro_batch_tokens(job, layouts), job.compute_bytes
    parallel, gated = np.asarray(layouts.ep) > 1, int(job.model.gated)
    rows = _rows(job, layouts, traced.token["inner"])
    one = rows.matrices / (2 + gated)
    # Of each inner element there are the saved ones, less the product, and the gradients of product, gate and up.
    inner_ratio = small * inner_tensors(job, traced.token["inner"]) / traced.token["inner"]
    experts_bytes = np.maximum.reduce(
        np.broadcast_arrays(
            np.where(parallel, 2.0, 1.0) * rows.arrived,
            rows.arrived + rows.inner + one,
            (inner_ratio - 1.0) * rows.kept + one,
            (1 + gated) * rows.arrived + rows.matrices + rows.inner - rows.kept,
        )
    )
    stream = small * sizes.hidden * tokens
    weighed = weighed_per_token(job, layouts) * tokens
    reduction_bytes = stream - rows.sent - rows.kept - weighed
    after_experts_bytes = reduction_bytes - rows.arrived + _after_experts(job, layouts, rows, sizes, saved_bytes)
    peak_bytes = stream - rows.sent - weighed + experts_bytes
    by_node = among(layouts.expert_exchange, BY_NODE)
    if np.any(by_node):
        relayed = np.where(by_node, _relayed(job, layouts, rows), 0.0)
        peak_bytes = np.maximum(peak_bytes, np.where(relayed > 0, stream + relayed - weighed, 0.0))
    # The experts' results in two orders, those of attention's last matrix, and the norm's of their sum.
    results = np.where(parallel, 2.0 * rows.arrived - rows.sent, 0.0) + 2.0 * stream
    peak_bytes = np.where(parallel, peak_bytes, np.maximum(peak_bytes, after_experts_bytes + rows.matrices))
    return BackwardBytes(peak_bytes, reduction_bytes, after_experts_bytes, stream + results)


def _relayed(job: Workload, layouts: Layouts, rows: _Rows) -> Column:
    """Return the bytes with which gradients cross to nodes and spread there (``parallel/expert/node_first.py``).

    There are a row per token and node, sent and received, and a row per choice, wide and in the compute type.
    """
    assert job.model.moe is not None, "experts of a dense model"
    tokens = micro_batch_tokens(job, layouts) / layouts.tp
    nodes = nodes_of_token(job.model.moe, layouts, job.domain)
    crossing = job.compute_bytes * job.model.hidden * tokens * nodes
    wide = 4 if job.compute_bytes < 4 else job.compute_bytes
    narrow = 1.0 if wide > job.compute_bytes else 0.0
    return 2.0 * crossing + rows.arrived * (wide / job.compute_bytes + narrow)


def _rows(job: Workload, layouts: Layouts, saved: float) -> _Rows:
    moe, small, parallel = job.model.moe, job.compute_bytes, np.asarray(layouts.ep) > 1
    assert moe is not None, "a dense model"
    tokens, load = micro_batch_tokens(job, layouts), rows_here(job, layouts)
    # Tensor ranks route shares of the tokens if ranks share experts.
    sent_bytes = (
        small * job.model.hidden * moe.top_k * np.asarray(layouts.etp) * tokens / np.where(parallel, layouts.tp, 1)
    )
    inner = moe.top_k * load * tensor_shares.width(moe.ffn_hidden, tensor_shares.outer(layouts)) * tokens
    _, experts = tensor_shares.share_columns(job, layouts).layers[MOE]
    return _Rows(sent_bytes * load, sent_bytes * rows_back(job, layouts), small * inner, saved * inner, small * experts)


def _after_experts(job: Workload, layouts: Layouts, rows: _Rows, sizes: LayerWidths, saved_bytes: Column) -> Column:
    """Return the most bytes of what follows the experts: rows on their way back, shared experts, router, attention.

    They come on top of what the layer saves outside of the experts, and of the stream's gradient; ``saved_bytes`` are
    those that the layer saves in all.
    """
    model, small, wide = job.model, job.compute_bytes, max(job.compute_bytes, 4)
    moe, tokens, parallel = model.moe, micro_batch_tokens(job, layouts), np.asarray(layouts.ep) > 1
    assert moe is not None, "a dense model"
    traced = coefficients(job.trace, model, job.precision, TracedKind(0, "none", job.stack.fused))
    assert traced is not None, "asked by the caller"
    local_tokens = tokens / np.where(parallel, layouts.tp, 1)
    width = moe.shared_experts * tensor_shares.width(moe.ffn_hidden, tensor_shares.outer(layouts))
    saved, matrix = traced.token["inner"], small * model.hidden * width
    back = np.where(
        parallel, np.maximum(2.0 * rows.arrived, rows.sent + np.maximum(rows.arrived, rows.sent)),
        rows.sent + small * model.hidden * local_tokens,
    )  # fmt: skip
    travelling = np.where(parallel, rows.arrived + rows.sent, rows.sent)
    network = travelling + tokens * width * (small * inner_tensors(job, saved) - saved) + matrix
    router = (small + (wide if wide > small else 0)) * model.hidden * local_tokens
    # All of the feed-forward network is freed when attention's gradients exist.
    freed = router_per_token(job, layouts) * tokens + saved * width * tokens
    matrices = (2 + model.gated) * matrix
    attention = small * tokens * (sizes.attention - sizes.latent - sizes.hidden) - freed + matrices
    attention = attention + attention_exchange_bytes(job, layouts)
    common, _ = tensor_shares.share_columns(job, layouts).layers[MOE]
    dense_saved_bytes = saved_bytes - rows.sent - rows.arrived - rows.kept
    ended = small * (common + 2.0 * sizes.hidden * tokens) - dense_saved_bytes
    moments_bytes = [back, network if moe.shared_experts else 0.0, router, attention, ended]
    if "norm" not in job.stack.fused and model.norm == "rmsnorm":
        # A norm of several operators has five wide tensors of the model's width at once, and its wide input.
        moments_bytes.append(tokens * sizes.hidden * (5 * wide - 2 * small) - freed + matrices)
        moments_bytes.append(
            tokens * sizes.hidden * 6 * wide + small * model.hidden * sizes.attention + matrices - dense_saved_bytes
        )
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*moments_bytes)))

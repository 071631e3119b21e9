"""Bytes that the backward pass of a layer with experts holds, in partool's runtime."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts
from partool.cost.memory.activations import LayerWidths, micro_batch_tokens, router_per_token, widths
from partool.cost.memory.backward import BackwardBytes, inner_tensors
from partool.cost.memory.rank_parameters import MOE
from partool.cost.memory.transient import attention_exchange_bytes
from partool.work.base import Workload
from partool.work.traced import TracedKind, coefficients


class _Rows(NamedTuple):
    """Bytes of tensors of the routed tokens; each field is a column."""

    arrived: Column
    """Of the hidden states that a rank's experts work on."""
    own: Column
    """Of the hidden states that a rank's tokens send to their experts."""
    inner: Column
    """Of one tensor of the experts' inner width."""
    kept: Column
    """Of all tensors of the inner width that the experts save."""
    matrices: Column
    """Of the gradients of the experts' matrices, in the compute type."""


def experts_backward(job: Workload, layouts: Layouts, whole: Column) -> BackwardBytes | None:
    """Return what the backward pass of a layer with experts takes; None if what such layers save is not traced.

    ``whole`` are the bytes that the layer saves without recomputation. The experts' part begins with the gradients of
    rows that travel (:mod:`partool_runtime.parallel.expert.dispatch`) and ends when the gradients of the rows by gate
    and up exist with all of the matrices.
    """
    known = coefficients(job.trace, job.model, job.precision, TracedKind(0, "none", job.stack.fused))
    if known is None:
        return None
    sizes, tokens, small = widths(job, layouts, MOE), micro_batch_tokens(job, layouts), job.compute_bytes
    parallel, gated = np.asarray(layouts.ep) > 1, int(job.model.gated)
    rows = _rows(job, layouts, known.token["inner"])
    one = rows.matrices / (2 + gated)
    # Of each inner element there are the saved ones, less the product, and the gradients of product, gate and up.
    there = small * inner_tensors(job, known.token["inner"]) / known.token["inner"]
    experts = np.maximum.reduce(
        np.broadcast_arrays(
            np.where(parallel, 2.0, 1.0) * rows.arrived,
            rows.arrived + rows.inner + one,
            (there - 1.0) * rows.kept + one,
            (1 + gated) * rows.arrived + rows.matrices + rows.inner - rows.kept,
        )
    )
    stream = small * sizes.hidden * tokens
    reducing = stream - rows.own - rows.kept
    after = reducing - rows.arrived + _after(job, layouts, rows, sizes, whole)
    working = stream - rows.own + experts
    # The experts' results in two orders, those of attention's last matrix, and the norm's of their sum.
    results = np.where(parallel, 2.0 * rows.arrived - rows.own, 0.0) + 2.0 * stream
    working = np.where(parallel, working, np.maximum(working, after + rows.matrices))
    return BackwardBytes(working, reducing, after, stream + results)


def _rows(job: Workload, layouts: Layouts, saved: float) -> _Rows:
    moe, small, parallel = job.model.moe, job.compute_bytes, np.asarray(layouts.ep) > 1
    assert moe is not None, "a dense model"
    tokens, load = micro_batch_tokens(job, layouts), np.where(parallel, job.load, 1.0)
    # Tensor ranks route shares of the tokens if ranks share experts.
    own = small * job.model.hidden * moe.top_k * np.asarray(layouts.etp) * tokens / np.where(parallel, layouts.tp, 1)
    inner = moe.top_k * load * tensor_shares.width(moe.ffn_hidden, tensor_shares.outer(layouts)) * tokens
    _, experts = tensor_shares.share_columns(job, layouts).layers[MOE]
    return _Rows(own * load, own, small * inner, saved * inner, small * experts)


def _after(job: Workload, layouts: Layouts, rows: _Rows, sizes: LayerWidths, whole: Column) -> Column:
    """Return the most bytes of what follows the experts: rows on their way back, shared experts, router, attention.

    They come on top of what the layer saves outside of the experts, and of the stream's gradient; ``whole`` are the
    bytes that the layer saves in all.
    """
    model, small, wide = job.model, job.compute_bytes, max(job.compute_bytes, 4)
    moe, tokens, parallel = model.moe, micro_batch_tokens(job, layouts), np.asarray(layouts.ep) > 1
    assert moe is not None, "a dense model"
    known = coefficients(job.trace, model, job.precision, TracedKind(0, "none", job.stack.fused))
    assert known is not None, "asked by the caller"
    own_tokens = tokens / np.where(parallel, layouts.tp, 1)
    width = moe.shared_experts * tensor_shares.width(moe.ffn_hidden, tensor_shares.outer(layouts))
    saved, matrix = known.token["inner"], small * model.hidden * width
    back = np.where(
        parallel, np.maximum(2.0 * rows.arrived, rows.own + np.maximum(rows.arrived, rows.own)),
        rows.own + small * model.hidden * own_tokens,
    )  # fmt: skip
    travelling = np.where(parallel, rows.arrived + rows.own, rows.own)
    network = travelling + tokens * width * (small * inner_tensors(job, saved) - saved) + matrix
    router = (small + (wide if wide > small else 0)) * model.hidden * own_tokens
    # All of the feed-forward network is freed when attention's gradients exist.
    freed = router_per_token(job, layouts) * tokens + saved * width * tokens
    matrices = (2 + model.gated) * matrix
    attention = small * tokens * (sizes.attention - sizes.latent - sizes.hidden) - freed + matrices
    attention = attention + attention_exchange_bytes(job, layouts)
    common, _ = tensor_shares.share_columns(job, layouts).layers[MOE]
    left = whole - rows.own - rows.arrived - rows.kept
    ended = small * (common + 2.0 * sizes.hidden * tokens) - left
    found = [back, network if moe.shared_experts else 0.0, router, attention, ended]
    if "norm" not in job.stack.fused and model.norm == "rmsnorm":
        # A norm of several operators has five wide tensors of the model's width at once, and its wide input.
        found.append(tokens * sizes.hidden * (5 * wide - 2 * small) - freed + matrices)
        found.append(tokens * sizes.hidden * 6 * wide + small * model.hidden * sizes.attention + matrices - left)
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*found)))

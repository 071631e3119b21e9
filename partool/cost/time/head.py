"""Seconds of the head, the loss, the embedding and its perturbation for one micro-batch on one rank."""

from __future__ import annotations

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import ONE_AT_THE_END, Column, Layouts, Mask, among
from partool.cost.silicon.products import TRANSPOSED
from partool.cost.time import eager
from partool.cost.time.elementwise import gap_s, stream_bytes_per_s
from partool.cost.time.gemm import matmul_s
from partool.cost.time.layer_pass import blended_s
from partool.cost.traffic.messages import tokens
from partool.work.base import Workload
from partool.work.stack import Stack

_PERTURBATION_BYTES = 350.0
"""Bytes that are read and written per number of a perturbation: 20 operators on 8-byte integers draw it, and about as
many on float32 move it and add it (``partool_runtime/model/perturbation.py``)."""


def head_s(job: Workload, layouts: Layouts, *, backward: bool, weights: bool = True) -> Column:
    """Return the seconds of the head and the loss for one micro-batch on the last stage.

    Modules that predict further tokens multiply by the head once each, after a projection to their block's input.
    Without ``weights``, a backward pass computes no gradients of weights.
    """
    model, stack = job.model, job.stack
    rows = tokens(job, layouts)
    vocab = tensor_shares.width(job.padded_vocab or model.vocab, layouts.tp if stack.vocab_parallel else 1)
    product = matmul_s(job, rows, vocab, model.hidden, wide=True)
    if backward:
        recompute_s = _logits_again(stack, layouts, rows, vocab) * product
        product = recompute_s + matmul_s(job, rows, model.hidden, vocab, wide=True)
        product = product + (TRANSPOSED * matmul_s(job, vocab, model.hidden, rows, wide=True) if weights else 0.0)
    moved = rows * vocab * stack.logit_bytes / stream_bytes_per_s(job)
    times = 1 + model.predictions * job.backward
    device = times * (product + 0.5 * moved + _mapped_logits_s(job, layouts, rows, vocab, backward=backward))
    if times > 1:
        device = device + (times - 1) * _projection_s(job, layouts, rows, backward=backward)
    device = stack.derate * device + times * stack.operators_head * gap_s(job)
    host = times * stack.operators_head * job.devices.operator_s * stack.host_slowdown
    return blended_s(job, device, host)


def _projection_s(job: Workload, layouts: Layouts, rows: Column, *, backward: bool) -> Column:
    """Return the seconds of one product with the projection of a module that predicts a further token.

    Every tensor rank has the whole matrix, and multiplies its share of the residual stream.
    """
    hidden, rows = job.model.hidden, rows / tensor_shares.stream(job, layouts)
    if not backward:
        return matmul_s(job, rows, hidden, 2 * hidden)
    return matmul_s(job, rows, 2 * hidden, hidden) + matmul_s(job, hidden, 2 * hidden, rows)


def _mapped_logits_s(job: Workload, layouts: Layouts, rows: Column, vocab: Column, *, backward: bool) -> Column:
    """Return the additional seconds of a CPU for logits that are so many that each tensor of them is mapped anew.

    The forward pass makes float32 logits and their logarithms of probabilities, the backward pass the gradients of
    both; where logits are computed again, these are one tensor more.
    """
    tile = np.asarray(layouts.loss_tile_tokens)
    each = 4.0 * np.where(tile > 0, np.minimum(tile, rows), rows) * vocab
    made = 2.0 + (_logits_again(job.stack, layouts, rows, vocab) if backward else 0.0)
    return eager.mapped_s(job, each, 4.0 * made * rows * vocab)


def _logits_again(stack: Stack, layouts: Layouts, rows: Column, vocab: Column) -> Column:
    """Return 1 where the backward pass computes logits a second time.

    Logits are computed again if there are too many to keep, and no fused loss computes their gradients in the forward
    pass. Some pipelines rule out a fused loss, as its gradients would have to wait for other micro-batches.
    """
    if not stack.logits_again:
        return 0.0
    tile = np.asarray(layouts.loss_tile_tokens)
    recomputed = np.where(tile > 0, tile < rows, rows * vocab > stack.logits_again)
    return np.where(computes_late(layouts) | ("loss" not in stack.fused), recomputed, 0.0)


def computes_late(layouts: Layouts) -> Mask:
    """Return True where the last stage's gradients wait for other micro-batches, which rules out a fused loss."""
    waits: Mask = (np.asarray(layouts.pp) > 1) & np.logical_not(among(layouts.schedule, ONE_AT_THE_END))
    return waits


def embedding_s(job: Workload, layouts: Layouts, *, backward: bool, weights: bool = True) -> Column:
    """Return the first stage's seconds of looking up embeddings, or of summing gradients, for one micro-batch.

    Without ``weights`` there are no gradients to sum.
    """
    if backward and not weights:
        return 0.0 * tokens(job, layouts)
    moved = (4.0 if backward else 2.0) * tokens(job, layouts) * job.model.hidden * job.compute_bytes
    return moved / layouts.tensor_inner / stream_bytes_per_s(job)


def perturbation_s(job: Workload, layouts: Layouts) -> Column:
    """Return the seconds in which a micro-batch's perturbation is drawn, moved and added to the embeddings."""
    elements = tokens(job, layouts) * job.model.hidden / tensor_shares.stream(job, layouts)
    return _PERTURBATION_BYTES * elements / stream_bytes_per_s(job)

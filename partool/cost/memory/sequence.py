"""Bytes that sequence parallelism adds to a rank for saved tensors and for buffers while a layer's attention runs."""

from __future__ import annotations

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import ATTENTION, FULL, KEEP_ATTENTION, Column, Layouts
from partool.cost.kinds import kinds
from partool.cost.memory.activations import micro_batch_tokens
from partool.cost.sequence import shares as sequence_shares
from partool.cost.sequence.price import PRICED, price_of
from partool.cost.sequence.types import AttentionBuffers, AttentionElements
from partool.cost.time.attention import widths
from partool.work.base import Workload


def saved_bytes(job: Workload, layouts: Layouts, policy: int) -> Column:
    """Return the bytes that sequence parallelism adds to the tensors that a layer saves for one micro-batch.

    Methods that exchange heads for tokens keep attention's results twice: before and after the exchange that follows.
    These methods keep queries, keys and values as received from other ranks; this adds bytes where heads do not divide
    evenly or ranks share key heads. Other methods add no bytes.
    """
    trades = (sequence_shares.trading(layouts) > 1) & (np.asarray(layouts.cp) > 1)
    if policy == FULL or not np.any(trades):
        return 0.0
    outside = _outside(job, layouts)
    inside = _inside(job, layouts, outside)
    more = inside.query - outside.query + inside.keys - outside.keys
    if policy == KEEP_ATTENTION:
        # This policy otherwise keeps no queries and keys, so all exchanged queries and keys are additional.
        more = inside.query + inside.keys
    if policy != ATTENTION:
        more = more + inside.result
    sums = 0.0 if policy == ATTENTION else inside.sums - outside.sums
    per_token = more * job.compute_bytes + sums * max(job.compute_bytes, 4)
    return np.where(trades, micro_batch_tokens(job, layouts) * per_token, 0.0)


def buffer_bytes(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes of extra buffers for one layer's attention in the pass (forward or backward) that needs more."""
    several = np.asarray(layouts.cp) > 1
    if not np.any(several):
        return 0.0
    windows = [kind.window for kind in kinds(job.model)]
    narrow = [window for window in windows if window is not None and window < job.sequence_length]
    widest = max(narrow) if len(narrow) == len(windows) else None
    one = AttentionBuffers(job, layouts, _inside(job, layouts, _outside(job, layouts)), widest)
    per_token, method = np.zeros(np.shape(several)), np.asarray(layouts.sequence_method)
    for index, name in PRICED:
        uses_method = several & (method == index)
        if np.any(uses_method):
            per_token = np.where(uses_method, price_of(name).buffers(one), per_token)
    return micro_batch_tokens(job, layouts) * per_token


def _outside(job: Workload, layouts: Layouts) -> AttentionElements:
    query, key, value = widths(job, layouts)
    heads, keys = tensor_shares.heads(job.model, layouts.tp)
    return AttentionElements(query, key + value, value / keys * heads, heads)


def _inside(job: Workload, layouts: Layouts, outside: AttentionElements) -> AttentionElements:
    heads, keys = tensor_shares.heads(job.model, layouts.tp)
    ranks, rank_heads = sequence_shares.trading(layouts), sequence_shares.heads(job, layouts)
    share, shared = ranks * rank_heads.queries / heads, ranks * rank_heads.keys / keys
    return AttentionElements(outside.query * share, outside.keys * shared, outside.result * share, outside.sums * share)

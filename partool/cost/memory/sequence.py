"""What sequence parallelism makes a rank hold: more saved tensors, and buffers while a layer's attention runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import (
    ALL_GATHER,
    ATTENTION,
    DSP,
    FULL,
    KEEP_ATTENTION,
    RING_OF_KEYS,
    STARTRAIL,
    USP,
    Column,
    Layouts,
    TrainingJob,
)
from partool.cost.kinds import kinds
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.attention import widths


class AttentionElements(NamedTuple):
    """Elements per token of this rank, within attention, on the rank that works on most heads; columns."""

    query: Column
    keys: Column
    """Of keys and values."""
    result: Column
    sums: Column
    """Sums of exponentials, one per head."""


def saved_bytes(job: TrainingJob, layouts: Layouts, policy: int) -> Column:
    """Return the bytes that a layer keeps more than its share of what it keeps alone, for one micro-batch.

    Where heads are traded for tokens, results are kept as attention gives them, and as the next product takes them;
    queries, keys and values as they arrive, which is more where heads do not divide or ranks share heads of keys. Other
    methods keep what attention alone keeps.
    """
    trades = (sequence_shares.trading(layouts) > 1) & (np.asarray(layouts.cp) > 1)
    if policy == FULL or not np.any(trades):
        return 0.0
    outside = _outside(job, layouts)
    inside = _inside(job, layouts, outside)
    more = inside.query - outside.query + inside.keys - outside.keys
    if policy == KEEP_ATTENTION:
        # What was exchanged is all that it keeps of them.
        more = inside.query + inside.keys
    if policy != ATTENTION:
        more = more + inside.result
    sums = 0.0 if policy == ATTENTION else inside.sums - outside.sums
    found = more * job.compute_bytes + sums * max(job.compute_bytes, 4)
    return np.where(trades, _rows(job, layouts) * found, 0.0)


def buffer_bytes(job: TrainingJob, layouts: Layouts) -> Column:
    """Return the bytes of what the attention of one layer holds besides, in the pass that needs more of it.

    Exchanges of heads: what is sent and what arrives. Blocks that travel: the one at work and the one that comes, in
    the backward pass with wide gradients: of the one, of the one before, of those that come home and of a rank's own;
    and those of the queries. StarTrail: all that but its own for a team, with queries, results and their gradients.
    Gathered: keys and values of all ranks, and their wide gradients. Windows take their neighbours' rows. DSP: the
    hidden state twice.
    """
    several = np.asarray(layouts.cp) > 1
    if not np.any(several):
        return 0.0
    small, wide = job.compute_bytes, max(job.compute_bytes, 4)
    sizes = _inside(job, layouts, _outside(job, layouts))
    method = np.asarray(layouts.sequence_method)
    traded = 2.0 * (sizes.query + sizes.keys) * small
    blocks = sizes.keys * (2.0 * small + 4.0 * wide) + sizes.query * wide
    team = blocks - sizes.keys * wide + (sizes.query + 2.0 * sizes.result) * small
    team = layouts.sequence_teams * team
    windows = [kind.window for kind in kinds(job.model)]
    if all(window is not None and window < job.sequence_length for window in windows):
        # As a share of a rank's own tokens.
        most = max(window for window in windows if window is not None) - 1
        near = sequence_shares.tokens(job, layouts) * sequence_shares.trading(layouts)
        halo = np.minimum(most / np.maximum(near, 1), layouts.cp)
        blocks = gathered = team = halo * sizes.keys * (small + wide) + sizes.query * wide
    else:
        gathered = layouts.cp * sizes.keys * (small + wide) + sizes.query * wide
    turned = 2.0 * job.model.hidden / tensor_shares.stream(job, layouts) * small
    found = np.select(
        [method == RING_OF_KEYS, method == USP, method == STARTRAIL, method == ALL_GATHER, method == DSP],
        [blocks, np.maximum(traded, blocks), team, gathered, turned],
        traded,
    )
    return np.where(several, _rows(job, layouts) * found, 0.0)


def _outside(job: TrainingJob, layouts: Layouts) -> AttentionElements:
    query, key, value = widths(job, layouts)
    heads, keys = tensor_shares.heads(job.model, layouts.tp)
    return AttentionElements(query, key + value, value / keys * heads, heads)


def _inside(job: TrainingJob, layouts: Layouts, outside: AttentionElements) -> AttentionElements:
    heads, keys = tensor_shares.heads(job.model, layouts.tp)
    ranks, found = sequence_shares.trading(layouts), sequence_shares.heads(job, layouts)
    share, shared = ranks * found.queries / heads, ranks * found.keys / keys
    return AttentionElements(outside.query * share, outside.keys * shared, outside.result * share, outside.sums * share)


def _rows(job: TrainingJob, layouts: Layouts) -> Column:
    return layouts.micro_batch * sequence_shares.tokens(job, layouts)

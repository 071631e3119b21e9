"""Seconds of rings in which each rank passes blocks of keys and values to the next."""

from __future__ import annotations

import numpy as np

from partool.cost import collective
from partool.cost.case import ZIGZAG, Column
from partool.cost.collective import RankGroup
from partool.cost.sequence.types import BLOCK_OPERATORS, AttentionTransfer, ExchangeTime, SequencePass
from partool.cost.time.gemm import streamed_s


def steps_of(one: SequencePass, ranks: Column, block: Column, group: RankGroup, *, alone: int) -> ExchangeTime:
    """Return the seconds of the steps of a ring whose blocks have ``block`` elements.

    In the backward pass, ``alone`` steps send keys without gradients, and the last gradients are sent without
    keys.
    """
    steps, share = np.maximum(ranks - 1, 0), 1.0 / np.maximum(ranks, 1)
    merges = steps * _merge_s(one, ranks)
    narrow = hop_s(one, block * one.small, group)
    if not one.backward:
        return ExchangeTime(
            merges=merges, steps=[AttentionTransfer(steps, narrow, share)], core_operators=steps * BLOCK_OPERATORS
        )
    wide, both = (hop_s(one, block * width, group) for width in (one.wide, one.small + one.wide))
    first = np.minimum(steps, alone)
    times = ((first, narrow), (steps - first, both), (np.clip(steps + 1 - alone, 0, 1), wide))
    return ExchangeTime(
        merges=merges,
        steps=[AttentionTransfer(count, seconds, share) for count, seconds in times],
        core_operators=2 * steps * BLOCK_OPERATORS,
    )


def hop_s(one: SequencePass, sent_bytes: Column, group: RankGroup) -> Column:
    """Return the seconds of one ring step, in which each rank sends to the next, over the ring's slowest link."""
    far = group.domains > 1
    return collective.send_s(one.job, sent_bytes, np.where(far, one.job.domain, 1))


def _merge_s(one: SequencePass, ranks: Column) -> Column:
    """Return the seconds to merge a received block's result, or to add its gradient of the queries.

    With zigzag shares every other block on average is seen by the later half of the rank's queries only, so that three
    quarters of the result are merged.
    """
    stack = one.job.stack
    moved_bytes = stack.ring_gradient_bytes if one.backward else stack.ring_merge_bytes
    if not moved_bytes:
        return 0.0
    # Ranks that exchange heads have the queries of all their tokens, with fewer heads.
    members = one.layouts.cp / np.maximum(ranks, 1)
    part = np.where(np.asarray(one.layouts.sequence_order) == ZIGZAG, 0.75, 1.0)
    return streamed_s(one.job, part * one.rows * members * one.result_width * moved_bytes)

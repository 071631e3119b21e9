"""Elements that a rank of StarTrail sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import INSIDES, Column
from partool.cost.sequence import halo as sequence_halo
from partool.cost.sequence import shares as sequence_shares
from partool.cost.sequence.ring_steps import hop_s, steps_of
from partool.cost.sequence.types import (
    NOTHING,
    TRADE_OPERATORS,
    AttentionBuffers,
    AttentionSizes,
    ExchangeTime,
    Sent,
    SentParts,
    SequencePass,
    SequenceTeams,
)
from partool.cost.time.attention import widths
from partool.layout.sequence import Spans, tokens
from partool.layout.startrail import Trails


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int, trails: Trails) -> Sent:
    """Return how many elements a rank sends in the attention of one layer; ``shares`` are the tokens of each rank.

    Layers with windows exchange only the keys and values inside the windows (:mod:`partool.cost.sequence.halo`). In
    other layers queries go to the C - 1 other ranks of the team; keys and values go to the C ranks whose rings begin
    with them (the paper first gathers them within the team; here each rank sends its keys and values directly); R - 1
    blocks of keys and values are passed on; and partial results return to the team, with their sums of exponentials.
    Where sizes divide evenly and there are as many key heads as query heads, the sum is 2·ranks/C + 2·(C - 1) times the
    keys and values that one rank holds, minus 2 where the ring of that rank begins with the rank's keys.

    In the backward pass queries are sent to the team again, with results, gradients of results and sums of
    exponentials. Keys and values are passed on again, with their gradients in float32 or wider. Gradients of queries
    and of keys then return to their ranks.
    """
    if heads.window is not None and heads.window < sum(map(tokens, shares)):
        return sequence_halo.sent(shares, heads, rank)
    mine = tokens(shares[rank])
    sizes = trails.sizes(shares)
    team, _ = trails.place(rank)
    others = sizes[team] - mine
    copies = mine * sum(reader != rank for reader in trails.readers(rank))
    passed = sum(sizes[trails.block(rank, step)] for step in range(trails.length - 1))
    last = trails.block(rank, trails.length - 1)
    returned = sizes[last] - (mine if last == team else 0)
    query, value = heads.queries * heads.key_dim, heads.queries * heads.value_dim
    pair = heads.keys * (heads.key_dim + heads.value_dim)
    team_mates = (trails.members - 1) * mine
    return Sent(
        forward=heads.batch * (team_mates * query + (copies + passed) * pair + others * value),
        backward=heads.batch * (team_mates * (query + 2 * value) + (copies + passed) * pair + others * query),
        forward_wide=heads.batch * others * heads.queries,
        backward_wide=heads.batch * (team_mates * heads.queries + (passed + returned) * pair),
    )


def parts(team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
    """Return how many elements a rank sends in one layer: it sends within attention only."""
    return SentParts(sent(every, heads, rank, team.trails), NOTHING)


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of sending queries, placing keys, passing keys around rings, and returning partial results.

    In the backward pass the team needs queries, results and their gradients, and returns gradients of queries;
    gradients of keys go around the ring with the keys and then return to the rank that holds the keys.
    """
    if one.windowed:
        return sequence_halo.exchange(one)
    job, layouts = one.job, one.layouts
    members = np.maximum(layouts.sequence_teams, 1)
    ranks = sequence_shares.ring(layouts)
    teams_apart = np.asarray(layouts.sequence_inside) == INSIDES.index("rings")
    team = one.group(members, np.where(teams_apart, ranks, 1))
    circle = one.group(ranks, np.where(teams_apart, 1, members))
    across = one.group(members, ranks * members)
    query, _, values = widths(job, layouts)
    heads, keys = tensor_shares.heads(job.model, layouts.tp)
    result = values / keys * heads
    block = one.rows * members * one.key_width
    within = one.rows * members
    seconds = steps_of(one, ranks, block, circle, alone=1)
    if one.backward:
        out_bytes = within * ((query + 2.0 * result) * one.small + heads * one.wide)
        back_bytes = within * query * one.small
    else:
        out_bytes, back_bytes = within * query * one.small, within * (result * one.small + heads * one.wide)
    sent = collective.all_to_all_s(job, out_bytes, team) + collective.all_to_all_s(job, back_bytes, team)
    near = one.group(ranks * members, 1)

    def placed(width: int) -> Column:
        # One ring of each group of ranks begins with a rank's keys; one of these rings is in the rank's group.
        others = collective.all_to_all_s(job, block * width, across)
        return others + np.where(members > 1, hop_s(one, block / members * width, near), 0.0)

    seconds.inside = seconds.inside + sent + placed(one.small) + (placed(one.wide) if one.backward else 0.0)
    seconds.core_operators = seconds.core_operators + 4 * TRADE_OPERATORS
    return seconds


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, of the blocks in the ring of its team, with queries and results."""
    if one.window is not None:
        return sequence_halo.buffers(one)
    sizes, small, wide = one.sizes, one.small, one.wide
    blocks = sizes.keys * (2.0 * small + 3.0 * wide) + sizes.query * wide
    return one.layouts.sequence_teams * (blocks + (sizes.query + 2.0 * sizes.result) * small)

"""What a rank of StarTrail sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence import halo as sequence_halo
from partool.cost.sequence.types import AttentionSizes, Sent
from partool.layout.sequence import Spans, tokens
from partool.layout.startrail import Trails


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int, trails: Trails) -> Sent:
    """Return what a rank sends in the attention of one layer; ``shares`` are those of all ranks.

    Layers with windows exchange only what is seen (:mod:`partool.cost.sequence.halo`). In others:

    queries go to the C - 1 others of the team; keys and values go to the C ranks whose rings begin with them (the
    paper gathers them in the team first, and sends the whole; here nothing is gathered that is only passed on); R - 1
    blocks of keys and values are passed on; and partial results go back to the team, with their sums of exponentials.
    Where sizes divide, that is 2·ranks/C + 2·(C - 1) times what one rank holds of keys and values, with as many heads
    of keys as of queries, less 2 where that rank itself begins with them.

    The backward pass needs the queries of the team again, with results, their gradients and sums of exponentials; it
    passes on keys and values, and their wide gradients; and returns those of queries and of keys.
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

"""Elements that a rank of Ulysses sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partool.cost import collective, tensor_shares
from partool.cost.case import Column
from partool.cost.sequence import shares as sequence_shares
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
from partool.cost.time.gemm import matmul_s
from partool.layout.sequence import Deal, Spans, deal_heads, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return how many elements a rank sends in the attention of one layer; ``shares`` are the tokens of each rank.

    A rank sends its tokens' queries, keys and values to the ranks that attend with their heads, and the results of its
    heads to the ranks that hold the tokens. In the backward pass it sends gradients of results to the ranks that
    attend, and gradients of queries, keys and values to the ranks that hold the tokens. Where sizes divide evenly, and
    with g = keys / queries, a rank sends (2 + 2·g)·(ranks - 1)/ranks times the queries that it holds, in each pass. No
    rank sends to itself.
    """
    deals = deal_heads(heads.queries, heads.keys, len(shares))
    away = [_widths(deal, heads) for other, deal in enumerate(deals) if other != rank]
    mine, of_others = tokens(shares[rank]), sum(tokens(spans) for spans in shares) - tokens(shares[rank])
    inputs, results = _widths(deals[rank], heads)
    return Sent(
        forward=heads.batch * (mine * sum(width for width, _ in away) + of_others * results),
        backward=heads.batch * (mine * sum(width for _, width in away) + of_others * inputs),
    )


def inside(heads: AttentionSizes, ranks: int, rank: int) -> AttentionSizes:
    """Return the sizes of attention on one rank; key heads that queries share unevenly are copied per query head."""
    deal = deal_heads(heads.queries, heads.keys, ranks)[rank]
    queries, keys = _count(deal.queries), _count(deal.keys)
    read = deal.keys_of_queries(heads.queries, heads.keys)
    alike = len({read.count(head) for head in read}) <= 1
    return heads._replace(queries=queries, keys=keys if alike else queries)


def _widths(deal: Deal, heads: AttentionSizes) -> tuple[int, int]:
    """Return the number of elements per token of attention's inputs, and of its results, for a rank's heads."""
    queries, keys = _count(deal.queries), _count(deal.keys)
    return queries * heads.key_dim + keys * (heads.key_dim + heads.value_dim), queries * heads.value_dim


def _count(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def parts(team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
    """Return how many elements a rank sends in one layer: it sends before and after attention only."""
    return SentParts(NOTHING, sent(every, heads, rank))


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of exchanging heads for tokens, which overlap with projections.

    Forward, keys are sent first, then queries, each while the next projection runs; backward, the gradients of values
    return first and go through their projection while the gradients of queries and keys are in transfer.
    """
    job, layouts = one.job, one.layouts
    ranks, small = sequence_shares.trading(layouts), one.small
    group = one.group(ranks, 1)
    query, key, value = widths(job, layouts)
    _, keys = tensor_shares.heads(job.model, layouts.tp)
    rank_heads = sequence_shares.heads(job, layouts)
    rows = one.rows * small
    # Each rank sends all heads of its tokens; for the result it sends all tokens of its heads.
    key_s, query_s, value_s, result_s = (
        collective.all_to_all_s(job, rows * width, group)
        for width in (
            key / keys * rank_heads.all_keys,
            query,
            value / keys * rank_heads.all_keys,
            ranks * rank_heads.queries * (value / keys if job.model.mla else job.model.head_dim),
        )
    )
    passes = 2.0 if one.backward else 1.0
    projections = (matmul_s(job, one.rows, width, job.model.hidden) for width in (query, value))
    of_query, of_value = (passes * each for each in projections)
    beside = ((query_s, of_value), (key_s, of_query)) if one.backward else ((key_s, of_query), (query_s, of_value))
    # With tensor ranks the three projections are one product, and a compiler orders exchanges by itself.
    able = (np.asarray(layouts.tp) == 1) & (np.asarray(layouts.compiled) == 0)
    hidden = sum(np.minimum(sent, job.stack.overlap_products * product) for sent, product in beside)
    return ExchangeTime(
        outside=key_s + query_s + value_s + result_s,
        hidden=np.where(able, hidden / job.stack.contention, 0.0),
        outer_operators=4 * TRADE_OPERATORS,
    )


def buffers(one: AttentionBuffers) -> Column:
    """Return the bytes, per token of a rank, of the tensors that are sent and received."""
    return 2.0 * (one.sizes.query + one.sizes.keys) * one.small

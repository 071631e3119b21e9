"""What a rank of Ulysses sends, counted exactly."""

from __future__ import annotations

from collections.abc import Sequence

from partool.cost.sequence.types import AttentionSizes, Sent
from partool.layout.sequence import Deal, Spans, deal_heads, tokens


def sent(shares: Sequence[Spans], heads: AttentionSizes, rank: int) -> Sent:
    """Return what a rank sends in the attention of one layer; ``shares`` are those of all ranks.

    Its tokens' queries, keys and values go to the ranks that work on their heads, and the results of its own heads to
    the ranks that hold the tokens. The backward pass sends gradients of the results the first way, and those of
    queries, keys and values the other. Where sizes divide, and g = keys / queries, that is (2 + 2·g)·(ranks - 1)/ranks
    times the queries that one rank holds, in each pass. Nobody sends to itself.
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
    """Return the heads that a rank works on. Queries that share heads of keys unevenly have copies of their own."""
    deal = deal_heads(heads.queries, heads.keys, ranks)[rank]
    queries, keys = _count(deal.queries), _count(deal.keys)
    read = deal.keys_of_queries(heads.queries, heads.keys)
    alike = len({read.count(head) for head in read}) <= 1
    return heads._replace(queries=queries, keys=keys if alike else queries)


def _widths(deal: Deal, heads: AttentionSizes) -> tuple[int, int]:
    """Return the elements per token of what attention takes and of what it gives, of a rank's heads."""
    queries, keys = _count(deal.queries), _count(deal.keys)
    return queries * heads.key_dim + keys * (heads.key_dim + heads.value_dim), queries * heads.value_dim


def _count(span: tuple[int, int]) -> int:
    return span[1] - span[0]

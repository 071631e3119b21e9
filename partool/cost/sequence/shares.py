"""Tokens and heads of sequence-parallel ranks, and the sizes of their teams and rings; as columns.

All values are for the fullest rank; :mod:`partool.layout.sequence` decides how uneven shares are dealt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import ORDERS, Column, Layouts, among
from partool.cost.kinds import Kind
from partool.layout.sequence import deal_heads
from partool.strategies.sequence import METHODS, SequenceRecord
from partool.work.base import Workload

_GRID = ORDERS.index("grid")


def _where(applies: Callable[[SequenceRecord], bool]) -> tuple[int, ...]:
    return tuple(index for index, record in enumerate(METHODS.values()) if applies(record))


TRADE_ALL = _where(lambda record: record.heads == "all")
TRADE_GROUPS = _where(lambda record: record.heads == "groups")
RINGS = _where(lambda record: record.keys == "ring")
GATHERED = _where(lambda record: record.keys == "gathered")
TEAMS = _where(lambda record: record.keys == "teams")
ON_GRIDS = _where(lambda record: record.on_grids)
"""Indices of the methods with each property; see :class:`partool.strategies.sequence.SequenceRecord`."""


def tokens(job: Workload, layouts: Layouts) -> Column:
    """Return the number of tokens of one sequence that the fullest rank holds."""
    even_share = tensor_shares.width(job.sequence_length, layouts.cp)
    if not job.model.grid or not np.any(np.asarray(layouts.sequence_order) == _GRID):
        return even_share
    rows, columns = job.model.grid
    return np.where(
        np.asarray(layouts.sequence_order) == _GRID, rows * tensor_shares.width(columns, layouts.cp), even_share
    )


def trading(layouts: Layouts) -> Column:
    """Return the number of ranks in each group of ranks that exchange tokens for heads."""
    groups = np.where(among(layouts.sequence_method, TRADE_GROUPS), layouts.sequence_inner, 1)
    return np.where(among(layouts.sequence_method, TRADE_ALL), layouts.cp, groups)


def ring(layouts: Layouts) -> Column:
    """Return the number of ranks in one ring of keys and values; 1 where there is no ring."""
    method = layouts.sequence_method
    teams = np.maximum(layouts.cp // np.maximum(layouts.sequence_teams * layouts.sequence_teams, 1), 1)
    return np.where(among(method, TEAMS), teams, np.where(among(method, RINGS), layouts.cp // trading(layouts), 1))


def blocks(layouts: Layouts, kind: Kind) -> Column:
    """Return the number of blocks of keys to which a rank attends one after the other."""
    if kind.axis:
        return 1.0
    return np.where(kind.window is None, ring(layouts), np.minimum(ring(layouts), 2))


class HeadShares(NamedTuple):
    """Numbers of query heads and key heads on the fullest rank, and of key heads sent to all ranks; as columns."""

    queries: Column
    keys: Column
    all_keys: Column
    """Number of key heads over all ranks that exchange heads; a head that several ranks need counts several times."""


def heads(job: Workload, layouts: Layouts) -> HeadShares:
    """Return numbers of heads of ranks that exchange tokens for heads, given those of the fullest tensor rank."""
    queries, keys = tensor_shares.heads(job.model, layouts.tp)
    ranks = trading(layouts)
    if not np.any(ranks > 1):
        return HeadShares(queries, keys, keys)
    counts = [np.asarray(each, dtype=np.int64) for each in (queries, keys, ranks)]
    code = np.asarray((counts[0] * 8192 + counts[1]) * 1048576 + counts[2])
    cases = np.array(sorted(set(code.ravel().tolist())))
    table = np.array([_dealt(one // 1048576 // 8192, one // 1048576 % 8192, one % 1048576) for one in cases.tolist()])
    most, needed, sent = table[np.searchsorted(cases, code)].T if code.ndim else table[0]
    return HeadShares(most, needed, sent)


@lru_cache(maxsize=4096)
def _dealt(queries: int, keys: int, ranks: int) -> tuple[int, int, int]:
    deals = deal_heads(queries, keys, ranks)
    each = [deal.keys[1] - deal.keys[0] for deal in deals]
    return max(deal.queries[1] - deal.queries[0] for deal in deals), max(each), sum(each)

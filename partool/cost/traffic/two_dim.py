"""Collectives of two-dimensional tensor parallelism (ATP, Cheng et al., arXiv 2301.08658), column-first.

The d1 × d2 tensor ranks are the axes ``tp0`` and ``tp1``; the hidden size is sharded over ``tp1``. In each of a layer's
pairs of matrices, the first matrix has its outputs sharded over ``tp0`` and its results summed over ``tp1``; for the
second the axes are swapped.
"""

from __future__ import annotations

import numpy as np

from partool.cost.case import Column, Layouts
from partool.cost.traffic.messages import Move, Moves, tokens
from partool.work.base import Workload


def embedding_moves(job: Workload, layouts: Layouts) -> Moves:
    """Return the collectives of the embedding.

    The embedding's rows are sharded over ``tp0`` and its widths over ``tp1``. A tied embedding is sharded over all
    ranks by whole rows, as the head needs whole rows; looked-up rows are reduce-scattered over ``tp1``, their gradients
    all-gathered.
    """
    rows, hidden = _rows(job, layouts), job.model.hidden
    summed = Move("all_reduce", "tp0", rows, hidden // _inner(layouts))
    if not job.model.tied_embeddings:
        return Moves([summed], [], [])
    dealt, gathered = Move("reduce_scatter", "tp1", rows, hidden), Move("all_gather", "tp1", rows, hidden)
    return Moves([dealt, summed], [gathered], [])


def layer_moves(job: Workload, layouts: Layouts) -> Moves:
    """Return the collectives of one layer.

    Results of queries, keys and values are summed over ``tp1`` and scattered by heads, so that the core of attention
    has heads / (d1 · d2) per rank; heads are gathered again for the output matrix. Products run on pieces of the
    tokens, forward and backward. A fully recomputed layer repeats its forward pass, except the last sum if it is sent
    in one piece, as no gradient needs that sum.
    """
    model, rows, pieces = job.model, _rows(job, layouts), layouts.tensor_chunks
    outer = np.maximum(layouts.tp // _inner(layouts), 1)
    queries, keys = model.heads * model.head_dim // outer, model.kv_heads * model.head_dim // outer
    widths, hidden = model.ffn_hidden // outer, model.hidden // _inner(layouts)
    statistics = _statistics(job, rows, norms=2)
    sums = Move("all_reduce", "tp0", rows, hidden, 2, pieces, beside="results")
    forward = [
        Move("reduce_scatter", "tp1", rows, queries + 2 * keys, 1, pieces, beside="results"),
        Move("all_gather", "tp1", rows, queries, 1, pieces, beside="results"),
        Move("all_reduce", "tp1", rows, widths * (2 if model.gated else 1), 1, pieces, beside="results"),
        sums,
        statistics,
    ]
    backward = [
        Move("all_gather", "tp1", rows, queries + 2 * keys, 1, pieces),
        Move("reduce_scatter", "tp1", rows, queries, 1, pieces, beside="weights"),
        Move("all_reduce", "tp1", rows, widths, 1, pieces, beside="weights"),
        sums._replace(beside="weights"),
        statistics,
    ]
    recompute = [one._replace(times=np.where(np.asarray(pieces) > 1, 2, 1)) if one is sums else one for one in forward]
    return Moves(forward, backward, recompute)


def head_moves(job: Workload, layouts: Layouts) -> Moves:
    """Return the collectives of final norm, head and loss.

    Every rank gathers the hidden state for its part of the vocabulary; gradients of the hidden state are scattered over
    ``tp1``, then summed over ``tp0``. For each token the ranks need its largest logit, then the sum of exponentials and
    the logit of its label.
    """
    rows, hidden = _rows(job, layouts), job.model.hidden
    statistics = _statistics(job, rows, norms=1)
    forward = [
        statistics,
        Move("all_gather", "tp1", rows, hidden),
        Move("all_reduce", "tp", rows, 1, wide=True),
        Move("all_reduce", "tp", rows, 2, wide=True),
    ]
    backward = [
        Move("reduce_scatter", "tp1", rows, hidden),
        Move("all_reduce", "tp0", rows, hidden // _inner(layouts)),
        statistics,
    ]
    return Moves(forward, backward, [])


def _statistics(job: Workload, rows: Column, norms: int) -> Move:
    """Return the all-reduce for norms, which need sums over the hidden size: of squares, or of values and squares."""
    return Move("all_reduce", "tp1", rows, 1, norms if job.model.norm == "rmsnorm" else 2 * norms, wide=True)


def _inner(layouts: Layouts) -> Column:
    return np.maximum(layouts.tensor_inner, 1)


def _rows(job: Workload, layouts: Layouts) -> Column:
    """Return the number of a micro-batch's tokens, or 0 where tensor parallelism is one-dimensional."""
    return tokens(job, layouts) * np.where(np.asarray(layouts.tensor_inner) > 1, 1, 0)

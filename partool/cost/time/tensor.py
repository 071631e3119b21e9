"""Seconds of tensor parallelism's collectives, and the part hidden by products that run at the same time.

``overlap: backward`` sends the gradients of a pair's inputs while the gradients of the pair's weights are computed
(Megatron-LM's asynchronous tensor parallelism); ``chunks`` sends the sum of one piece while the next piece is
multiplied (ATP, arXiv 2301.08658, section 4.2); ``symmetric`` does both, piece by piece, in fused kernels. In compiled
blocks the compiler orders collectives, usually one after the other, and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from partool.cost import collective
from partool.cost.case import OVERLAPS, Column, Layouts, Mask
from partool.cost.collective import RankGroup
from partool.cost.kinds import Kind
from partool.cost.time.gemm import streamed_s
from partool.cost.traffic import two_dim
from partool.cost.traffic.messages import Axis, Move, Moves
from partool.cost.traffic.tensor import embedding_moves, halves_passes, head_moves, layer_moves
from partool.work.base import Workload

_BACKWARD, _SYMMETRIC = (OVERLAPS.index(name) for name in ("backward", "symmetric"))
_PASSES = ("forward", "backward")
Lister = Callable[[Workload, Layouts], Moves]
_COST = {
    "all_reduce": collective.all_reduce_s,
    "all_gather": collective.gather_s,
    "reduce_scatter": collective.reduce_scatter_s,
}


class Seconds(NamedTuple):
    """Seconds of one pass of a layer, the embedding or the head, over one micro-batch."""

    alone: Column
    """Seconds of collectives that no product may overlap with."""
    beside: Column
    """Seconds of collectives that products may overlap with."""

    @property
    def total(self) -> Column:
        """Seconds of all collectives."""
        return self.alone + self.beside


class TensorSeconds(NamedTuple):
    """Seconds of the collectives of a layer, of the embedding or of the head."""

    forward: Seconds
    backward: Seconds
    recompute_s: Column
    """Seconds of collectives that full recomputation repeats."""

    def times(self, number: float) -> TensorSeconds:
        """Return the seconds of ``number`` collectives in the place of each one."""
        forward, backward = (Seconds(number * sent.alone, number * sent.beside) for sent in self[:2])
        return TensorSeconds(forward, backward, number * self.recompute_s)


NOTHING = TensorSeconds(Seconds(0.0, 0.0), Seconds(0.0, 0.0), 0.0)


def tensor_group(job: Workload, layouts: Layouts, axis: Axis) -> RankGroup:
    """Return the group of tensor ranks along ``axis``; ``tp1`` is the innermost axis."""
    inner = layouts.tensor_inner
    if axis == "tp1":
        return collective.group(job, inner, 1)
    if axis == "tp0":
        return collective.group(job, layouts.tp // inner, inner)
    return collective.group(job, layouts.tp, 1)


def move_s(job: Workload, layouts: Layouts, move: Move) -> Column:
    """Return the seconds of a collective over all its calls and pieces; 0 where a layout has no such collective."""
    each = max(job.compute_bytes, 4) if move.wide else job.compute_bytes
    payload_bytes = move.rows * move.width * each * _narrowed(job, move)
    ranks, cost = tensor_group(job, layouts, move.axis), _COST[move.kind]
    pieces = np.where(np.asarray(layouts.compiled) == 1, 1, np.maximum(move.pieces, 1))
    seconds = pieces * cost(job, payload_bytes / pieces, ranks)
    copies = _copies(job, layouts, move)
    if np.any(copies):
        seconds = seconds + copies * streamed_s(job, 2.0 * np.asarray(payload_bytes))
    return np.where(np.asarray(payload_bytes) > 0, move.times * seconds, 0.0)


def _copies(job: Workload, layouts: Layouts, move: Move) -> Column:
    """Return how often a collective's whole tensor is read and written beside it, in one call."""
    copies = job.stack.tensor_copies
    if job.stack.copies_several:
        return 0.0 if move.kind == "all_reduce" else np.where(np.asarray(layouts.micro_batch) > 1, copies, 0.0)
    # Other code bases' pairs of gathers and reduce-scatters are listed as all-reduces, which are as long.
    return 2.0 * copies if move.kind == "all_reduce" else copies


def _narrowed(job: Workload, move: Move) -> float:
    """Return the share of a collective's bytes that is left where gathers send eight-bit elements."""
    if job.precision != "fp8" or not job.stack.fp8_tensor_gathers or move.wide:
        return 1.0
    # An all-reduce stands for a gather and a reduce-scatter, of which only the gather is narrow.
    return {"all_gather": 0.5, "all_reduce": 0.75}.get(move.kind, 1.0)


def layer_seconds(job: Workload, layouts: Layouts, kind: Kind, *, weights: bool = True) -> TensorSeconds:
    """Return the seconds of the collectives of a layer of ``kind``; experts have one-dimensional parallelism only.

    Without ``weights``, its backward pass computes no gradients of weights.
    """
    sent = _passes(job, layouts, partial(layer_moves, kind=kind, weights=weights), two_dim.layer_moves)
    return sent.times(job.stack.tensor_exchanges)


def embedding_seconds(job: Workload, layouts: Layouts) -> TensorSeconds:
    """Return the seconds of the embedding's collectives."""
    return _passes(job, layouts, embedding_moves, two_dim.embedding_moves)


def head_seconds(job: Workload, layouts: Layouts) -> TensorSeconds:
    """Return the seconds of the head's and the loss's collectives; zero where each rank has the whole head."""
    return _passes(job, layouts, head_moves, two_dim.head_moves) if job.stack.vocab_parallel else NOTHING


def _passes(job: Workload, layouts: Layouts, one: Lister, two: Lister) -> TensorSeconds:
    """Return the seconds of the collectives of one-dimensional or two-dimensional tensor parallelism."""
    if not np.any(np.asarray(layouts.tp) > 1):
        return NOTHING
    lists = [one(job, layouts)]
    if np.any(np.asarray(layouts.tensor_inner) > 1):
        lists.append(two(job, layouts))
    forward, backward = (_sum(job, layouts, [getattr(moves, name) for moves in lists]) for name in _PASSES)
    # Code bases that do not stop early recompute a layer to its end, its last sum included.
    stops_early = job.stack.sequence_parallel is None or job.stack.stops_early
    recompute_s = _sum(job, layouts, [moves.recompute for moves in lists]).total if stops_early else forward.total
    return TensorSeconds(forward, backward, recompute_s)


def _sum(job: Workload, layouts: Layouts, lists: Iterable[list[Move]]) -> Seconds:
    alone: Column = 0.0
    beside: Column = 0.0
    for move in (move for moves in lists for move in moves):
        if move.beside:
            beside = beside + move_s(job, layouts, move)
        else:
            alone = alone + move_s(job, layouts, move)
    return Seconds(alone, beside)


def exposed_forward_s(job: Workload, layouts: Layouts, sent: Seconds, second_s: Column, all_s: Column) -> Column:
    """Return the exposed seconds of a forward pass's collectives.

    ``second_s`` is the time of the pairs' second products, whose pieces hide the sums of earlier pieces; ``all_s`` is
    the time of all products of the pass, which hide the transfers of fused kernels.
    """
    pieces = pieces_sent(layouts)
    # The last piece's sum comes after all products.
    plain = _exposed_s(job, sent.beside, second_s * (1.0 - 1.0 / pieces), sent.beside / pieces)
    fused = _exposed_s(job, sent.total, all_s, sent.total / np.maximum(layouts.tp, 1))
    return np.where((layouts.tensor_overlap == _SYMMETRIC) & _may_overlap(job, layouts), fused, sent.alone + plain)


def exposed_backward_s(job: Workload, layouts: Layouts, sent: Seconds, weights_s: Column, all_s: Column) -> Column:
    """Return the exposed seconds of a backward pass's collectives.

    ``weights_s`` is the time of the products that compute weight gradients of the pairs' first matrices, ``all_s`` the
    time of all products that compute input gradients.
    """
    able = _may_overlap(job, layouts)
    hidden = np.where((layouts.tensor_overlap == _BACKWARD) & able, weights_s, 0.0)
    fused = _exposed_s(job, sent.total, all_s, sent.total / np.maximum(layouts.tp, 1))
    plain = sent.alone + _exposed_s(job, sent.beside, hidden, 0.0)
    return np.where((layouts.tensor_overlap == _SYMMETRIC) & able, fused, plain)


def pieces_sent(layouts: Layouts) -> Column:
    """Return the number of pieces in which sums are sent; one in compiled blocks, whatever the layout says."""
    return np.where(np.asarray(layouts.compiled) == 1, 1, layouts.tensor_chunks)


def _may_overlap(job: Workload, layouts: Layouts) -> Mask:
    """Return True where products can hide sending input gradients: in passes that are neither split nor compiled."""
    unsplit: Mask = (np.asarray(layouts.compiled) == 0) & (np.asarray(halves_passes(job, layouts)) == 0)
    return unsplit


def _exposed_s(job: Workload, sent_s: Column, products_s: Column, least_s: Column) -> Column:
    """Return the exposed seconds of collectives, plus the slowdown of the products that run at the same time."""
    stack = job.stack
    shown = np.maximum(sent_s - stack.overlap_products * products_s, np.minimum(least_s, sent_s))
    return shown + (stack.contention - 1.0) * (sent_s - shown)

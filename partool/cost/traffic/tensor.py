"""Collectives of tensor parallelism in a step: as columns for many layouts, and counted exactly for one layout.

Collectives are lists of :class:`partool.cost.traffic.messages.Move`; seconds (:mod:`partool.cost.time.tensor`) and the
bytes that the runtime's counters report follow from the same lists. One-dimensional tensor parallelism follows
Megatron-LM (arXiv 1909.08053, section 3; with sharded norms arXiv 2205.05198, section 4);
:mod:`partool.cost.traffic.two_dim` has two-dimensional tensor parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from partool.cost.case import HALVED, SCHEDULES, Column, Layouts, among
from partool.cost.codec import encode
from partool.cost.kinds import Kind, kinds
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.adapter import adapts_inputs, norm_sums
from partool.cost.traffic import two_dim
from partool.cost.traffic.messages import Collective, Move, Moves, tokens
from partool.layout.tensor import chunks
from partool.plan.layout import Layout
from partool.plan.schedule import splits_backward
from partool.work.base import Workload


class CollectiveCall(NamedTuple):
    """Identical collectives that one rank takes part in: their kind, size, number of ranks and number of calls."""

    kind: Collective
    payload_bytes: int
    """Size of the whole tensor: the result of an all-gather, the input of a reduce-scatter or an all-reduce."""
    ranks: int
    times: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends: (n-1)/n of the whole, twice that in an all-reduce; each call rounds down."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return self.times * (rounds * self.payload_bytes * (self.ranks - 1) // self.ranks)


def padded_tokens(job: Workload, layouts: Layouts) -> Column:
    """Return the number of a micro-batch's tokens, plus the padding of the last tensor rank's share of the sequence."""
    tp, length = layouts.tp, sequence_shares.tokens(job, layouts)
    return layouts.micro_batch * tp * -(-length // tp)


def embedding_moves(job: Workload, layouts: Layouts) -> Moves:
    """Return the collectives of the embedding, sharded by vocabulary rows: looked-up rows are summed over the ranks."""
    shares, plain = _where(layouts)
    padded, hidden = padded_tokens(job, layouts) * shares, job.model.hidden
    forward = [
        Move("all_reduce", "tp", tokens(job, layouts) * plain, hidden),
        Move("reduce_scatter", "tp", padded, hidden),
    ]
    return Moves(forward, [Move("all_gather", "tp", padded, hidden)], [])


def layer_moves(job: Workload, layouts: Layouts, kind: Kind, *, weights: bool = True) -> Moves:
    """Return the collectives of one layer of a kind: those of attention and those of its network or experts.

    Without ``weights``, its backward pass computes no gradients of weights.
    """
    lists = (
        _pair_moves(job, layouts, kind, weights=weights),
        _expert_moves(job, layouts) if kind.moe else Moves([], [], []),
        _norm_moves(job, layouts, kind),
    )
    return Moves(*([move for moves in lists for move in moves[each]] for each in range(len(Moves._fields))))


def _norm_moves(job: Workload, layouts: Layouts, kind: Kind) -> Moves:
    """Return the sums of the squares of rows, for DoRA's norms, of matrices whose columns ranks share."""
    times = norm_sums(job.model, kind.moe)
    if not times:
        return Moves([], [], [])
    shares, plain = _where(layouts)
    sums = [Move("all_reduce", "tp", np.maximum(shares, plain), job.model.hidden, times, wide=True)]
    return Moves(sums, [], sums)


def _pair_moves(job: Workload, layouts: Layouts, kind: Kind, *, weights: bool) -> Moves:
    """Return the collectives of pairs of matrices, the first sharded by columns, the second by rows.

    Attention is one pair, the network another one. Of a layer of experts only the shared experts are a pair, and only
    where tensor ranks route different tokens; recomputation repeats their sum, as it goes on to the routed experts.

    Without sharded norms a pair all-reduces its results forward and the gradients of its inputs backward. With sharded
    norms it all-gathers its inputs and reduce-scatters its results; only the shard is kept, so the backward pass
    gathers the inputs a second time for the gradients of the weights, unless :func:`keeps_gathered`. In latent
    attention the inputs are latents, and the part that all keys share enters no matrix after its exchange.
    """
    shares, plain = _where(layouts)
    rows, hidden, pieces = tokens(job, layouts) * plain, job.model.hidden, layouts.tensor_chunks
    padded = padded_tokens(job, layouts) * shares
    twice, network = int(weights) * (1 - keeps_gathered(job, layouts)), _network_pairs(job, layouts, kind)
    mla = job.model.mla
    latents = Counter([] if mla is None else [*([mla.q_rank] if mla.q_rank else []), mla.kv_rank])
    shared = Counter([] if mla is None else [mla.rope_head_dim])
    hidden_inputs = network + (1 if mla is None or not mla.q_rank else 0)
    entering = [(hidden, hidden_inputs), *(latents + shared).items()]
    forward = [
        Move("all_reduce", "tp", rows, hidden, 1 + network, pieces, beside="results"),
        *(Move("all_gather", "tp", padded, width, times) for width, times in entering),
        Move("reduce_scatter", "tp", padded, hidden, 1 + network, pieces, beside="results"),
    ]
    backward = [
        *(Move("all_reduce", "tp", rows, width, times, beside="weights") for width, times in entering),
        Move("all_gather", "tp", padded, hidden, 1 + network + hidden_inputs * twice),
        *(Move("all_gather", "tp", padded, width, times * twice) for width, times in latents.items()),
        *(Move("reduce_scatter", "tp", padded, width, times, beside="weights") for width, times in entering),
    ]
    times = 1 + network if kind.moe else 1
    recompute = [one._replace(times=times) if one.kind != "all_gather" else one for one in forward]
    return Moves(forward, backward, recompute)


def _network_pairs(job: Workload, layouts: Layouts, kind: Kind) -> Column:
    """Return 1 where the layer's network, or its shared experts, are a pair of matrices with collectives of its own."""
    if not kind.moe:
        return 1
    moe = job.model.moe
    return np.where(layouts.ep > 1, int(moe is not None and moe.shared_experts > 0), 0)


def _expert_moves(job: Workload, layouts: Layouts) -> Moves:
    """Return the collectives around routed experts.

    Where ranks share experts, tensor ranks route different tokens: those of their shard of the norms, or shares
    of all tokens, whose results are gathered forward, whose inputs' gradients backward. Elsewhere tensor ranks hold
    parts of all experts, and of the shared ones, and exchange the inputs and results of the layer as a pair does,
    without products beside the collectives; the gathered inputs are kept. The weights of residual experts travel with
    the results, and as both are multiplied afterwards, recomputation gathers them, too.
    """
    shares, plain = _where(layouts)
    apart, hidden = np.where(layouts.ep > 1, 1, 0), job.model.hidden
    weighed = plain * apart * int(job.model.moe is not None and job.model.moe.residual)
    rows, padded = tokens(job, layouts) * plain * (1 - apart), padded_tokens(job, layouts)
    gathered, sharded = padded * plain * apart, padded * shares * (1 - apart)
    pass_ = [
        Move("all_reduce", "tp", rows, hidden),
        Move("all_gather", "tp", gathered + sharded, hidden),
        Move("reduce_scatter", "tp", sharded, hidden),
    ]
    if not np.any(weighed):
        return Moves(pass_, pass_, [Move("all_gather", "tp", sharded, hidden)])
    forward = [pass_[0], Move("all_gather", "tp", gathered + sharded, hidden + weighed), pass_[2]]
    return Moves(forward, pass_, [Move("all_gather", "tp", gathered * weighed + sharded, hidden + weighed)])


def head_moves(job: Workload, layouts: Layouts) -> Moves:
    """Return the collectives of the head and the loss, whose logits stay sharded.

    For each token the ranks need its largest logit, then the sum of exponentials and the logit of its label.
    """
    shares, plain = _where(layouts)
    rows, hidden = tokens(job, layouts), job.model.hidden
    padded = padded_tokens(job, layouts) * shares
    forward = [
        Move("all_gather", "tp", padded, hidden),
        Move("all_reduce", "tp", rows * np.maximum(shares, plain), 1, wide=True),
        Move("all_reduce", "tp", rows * np.maximum(shares, plain), 2, wide=True),
    ]
    backward = [
        Move("all_reduce", "tp", rows * plain, hidden),
        Move("reduce_scatter", "tp", padded, hidden),
    ]
    return Moves(forward, backward, [])


def keeps_gathered(job: Workload, layouts: Layouts) -> Column:
    """Return 1 where passes keep gathered inputs: if weight gradients are postponed or blocks are compiled.

    Products beside those of an adapter keep them, too: the exchange is not a part of one product.
    """
    if adapts_inputs(job.model):
        return np.ones_like(np.asarray(layouts.tp))
    return np.maximum(halves_passes(job, layouts), np.where(np.asarray(layouts.compiled) == 1, 1, 0))


def halves_passes(job: Workload, layouts: Layouts) -> Column:
    """Return 1 where backward passes are split: first the gradients of inputs, later the gradients of weights."""
    splits = job.lists is not None and splits_backward(job.lists)
    names = (*HALVED, SCHEDULES.index("file")) if splits else HALVED
    return np.where(among(layouts.schedule, names) & (np.asarray(layouts.pp) > 1), 1, 0)


def _where(layouts: Layouts) -> tuple[Column, Column]:
    """Return two columns: 1 where norms are sharded, and 1 where one-dimensional parallelism has no sharded norms."""
    one = (np.asarray(layouts.tp) > 1) & (np.asarray(layouts.tensor_inner) == 1)
    shares = np.asarray(layouts.sequence_norms) == 1
    return np.where(one & shares, 1, 0), np.where(one & ~shares, 1, 0)


def pass_calls(
    job: Workload, layout: Layout, stages: Sequence[int], *, ascent: bool = False
) -> Iterator[CollectiveCall]:
    """Yield the collectives of all passes over all micro-batches, or those of the passes that find perturbations."""
    layers = [layer for stage in stages for layer in range(*layout.pipeline.bounds[stage])]
    layouts, one = encode(layout), layout.tensor.inner == 1
    for included, lister in (
        (0 in stages, embedding_moves if one else two_dim.embedding_moves),
        (len(layout.pipeline.bounds) - 1 in stages, head_moves if one else two_dim.head_moves),
    ):
        moves = lister(job, layouts) if included else Moves([], [], [])
        moves = moves if job.backward else Moves(moves.forward, [], [])
        # The ascent's backward pass ends at the embeddings.
        ends = ascent and lister is not head_moves
        for move in (*moves.forward, *(() if ends else moves.backward)):
            yield from _counted(job, layout, move, 1)
    counts = Counter((kinds(job.model)[layer], layout.recompute[layer] == "full") for layer in layers)
    for (kind, recomputes), times in counts.items():
        moves = layer_moves(job, layouts, kind, weights=not ascent) if one else two_dim.layer_moves(job, layouts)
        moves = moves if job.backward else Moves(moves.forward, [], [])
        for move in (*moves.forward, *moves.backward, *(moves.recompute if recomputes else ())):
            yield from _counted(job, layout, move, times)


def _counted(job: Workload, layout: Layout, move: Move, units: int) -> Iterator[CollectiveCall]:
    """Yield the calls of a collective of ``units`` layers (or of embedding or head) over all micro-batches."""
    sizes = {"tp": layout.mesh.tp, "tp0": layout.mesh.tp // layout.tensor.inner, "tp1": layout.tensor.inner}
    each = max(job.compute_bytes, 4) if move.wide else job.compute_bytes
    # An adapter may be in some of the layers of a kind.
    times = round(float(move.times) * units) * layout.derived.accumulation
    if sizes[move.axis] == 1 or not times:
        return
    for start, stop in chunks(int(move.rows), int(move.pieces)):
        if stop > start:
            yield CollectiveCall(move.kind, (stop - start) * int(move.width) * each, sizes[move.axis], times)

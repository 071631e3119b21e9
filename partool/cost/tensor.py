"""What tensor parallelism sends: every collective of a step, once as columns and once counted exactly.

A step's collectives are :class:`partool.cost.moves.Move` lists; seconds (:mod:`partool.cost.tensor_time`) and the bytes
that the runtime's counters see follow from the same ones. One dimension: Megatron-LM (arXiv 1909.08053,
section 3), with norms on shares of the sequence arXiv 2205.05198, section 4. Two: :mod:`partool.cost.two_dim`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from partool.cost import two_dim
from partool.cost.case import SCHEDULES, Column, Job, Layouts, among
from partool.cost.columns import columns
from partool.cost.moves import Kind, Move, Moves, tokens
from partool.cost.pipeline import stages_of_ranks
from partool.layout.mesh import shard_rows
from partool.layout.parameters import ParameterInfo, groups, is_frozen
from partool.layout.tensor import Partition, by_name, chunks, own_partition
from partool.plan.schedule import splits_backward
from partool.plan.types import Layout
from partool.schedule import SCHEDULES as KNOWN

_HALVED = tuple(SCHEDULES.index(name) for name, known in KNOWN.items() if known.split)


class Call(NamedTuple):
    """Collectives of one rank that are alike."""

    kind: Kind
    payload_bytes: int
    """Of the whole tensor: what comes out of an all-gather, what goes into a reduce-scatter or an all-reduce."""
    ranks: int
    times: int

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in rings: (n-1)/n of the whole, twice that in an all-reduce; bytes per call round down."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return self.times * (rounds * self.payload_bytes * (self.ranks - 1) // self.ranks)


def padded_tokens(job: Job, layouts: Layouts) -> Column:
    """Return the same where each tensor rank holds a share of the sequence: the last one is padded."""
    tp, length = layouts.tp, job.sequence_length // layouts.cp
    return layouts.micro_batch * tp * -(-length // tp)


def embedding_moves(job: Job, layouts: Layouts) -> Moves:
    """Return the collectives of the embedding, cut by tokens: its rows are summed over the ranks."""
    shares, plain = _where(layouts)
    padded, hidden = padded_tokens(job, layouts) * shares, job.model.hidden
    forward = [
        Move("all_reduce", "tp", tokens(job, layouts) * plain, hidden),
        Move("reduce_scatter", "tp", padded, hidden),
    ]
    return Moves(forward, [Move("all_gather", "tp", padded, hidden)], [])


def layer_moves(job: Job, layouts: Layouts) -> Moves:
    """Return the collectives of one layer: two pairs of matrices, each cut by columns, then by rows.

    Without shares of the sequence a pair sums its results forward and the gradients of its inputs backward. With shares
    it gathers its inputs and scatters its results; only the share is kept, so that the backward pass gathers the inputs
    a second time for the gradients of the weights, unless :func:`keeps_gathered`.
    """
    shares, plain = _where(layouts)
    rows, hidden, pieces = tokens(job, layouts) * plain, job.model.hidden, layouts.tensor_chunks
    padded = padded_tokens(job, layouts) * shares
    gathers = 4 - 2 * keeps_gathered(job, layouts)
    forward = [
        Move("all_reduce", "tp", rows, hidden, 2, pieces, beside="results"),
        Move("all_gather", "tp", padded, hidden, 2),
        Move("reduce_scatter", "tp", padded, hidden, 2, pieces, beside="results"),
    ]
    backward = [
        Move("all_reduce", "tp", rows, hidden, 2, beside="weights"),
        Move("all_gather", "tp", padded, hidden, gathers),
        Move("reduce_scatter", "tp", padded, hidden, 2, beside="weights"),
    ]
    again = [one._replace(times=1) if one.kind != "all_gather" else one for one in forward]
    return Moves(forward, backward, again)


def head_moves(job: Job, layouts: Layouts) -> Moves:
    """Return the collectives of the head and the loss, whose logits stay where they are.

    Of each token the ranks need its largest logit, then the sum of exponentials and the logit of its label.
    """
    shares, plain = _where(layouts)
    rows, hidden = tokens(job, layouts), job.model.hidden
    padded = padded_tokens(job, layouts) * shares
    forward = [
        Move("all_gather", "tp", padded, hidden),
        Move("all_reduce", "tp", rows * (shares | plain), 1, wide=True),
        Move("all_reduce", "tp", rows * (shares | plain), 2, wide=True),
    ]
    backward = [
        Move("all_reduce", "tp", rows * plain, hidden),
        Move("reduce_scatter", "tp", padded, hidden),
    ]
    return Moves(forward, backward, [])


def keeps_gathered(job: Job, layouts: Layouts) -> Column:
    """Return 1 where a pass keeps what it gathered: gradients of weights come later, or a compiler orders exchanges."""
    return np.maximum(halves_passes(job, layouts), np.where(np.asarray(layouts.compiled) == 1, 1, 0))


def halves_passes(job: Job, layouts: Layouts) -> Column:
    """Return 1 where backward passes come in halves, gradients of inputs and of weights."""
    own = job.lists is not None and splits_backward(job.lists)
    names = (*_HALVED, SCHEDULES.index("file")) if own else _HALVED
    return np.where(among(layouts.schedule, names) & (np.asarray(layouts.pp) > 1), 1, 0)


def _where(layouts: Layouts) -> tuple[Column, Column]:
    """Return 1 where there are shares of the sequence, and 1 where one dimension of ranks has none."""
    one = (np.asarray(layouts.tp) > 1) & (np.asarray(layouts.tensor_inner) == 1)
    shares = np.asarray(layouts.sequence_norms) == 1
    return np.where(one & shares, 1, 0), np.where(one & ~shares, 1, 0)


def tensor_bytes(job: Job, layout: Layout) -> int:
    """Return the bytes that the busiest rank sends per step to the ranks that share its matrices."""
    if layout.mesh.tp == 1:
        return 0
    ranks = _different(job, layout)
    return max(
        sum(call.sent_bytes for call in tensor_calls(job, layout, stages, rank))
        for stages in stages_of_ranks(layout)
        for rank in ranks
    )


def tensor_calls(job: Job, layout: Layout, stages: Sequence[int], rank: int = 0, shard: int = 0) -> list[Call]:
    """Return the collectives of a step of a tensor rank (flat: i0 · d2 + i1) that runs these pipeline stages.

    ``shard`` is its place among the ranks that share the state. The norm of all gradients is not among them.
    """
    found: list[Call] = []
    policies = layout.recompute
    for stage in stages:
        start, stop = layout.stages[stage]
        parts = [(_moves(job, layout, "layer"), policies[at] == "full") for at in range(start, stop)]
        parts += [(_moves(job, layout, "embedding"), False)] * (stage == 0)
        parts += [(_moves(job, layout, "head"), False)] * (stage == len(layout.stages) - 1)
        for moves, again in parts:
            passes = [*moves.forward, *moves.backward, *(moves.again if again else ())]
            found += [call for move in passes for call in _counted(job, layout, move)]
    return [*found, *_sync(job, layout, stages, rank, shard)]


def _moves(job: Job, layout: Layout, unit: str) -> Moves:
    """Return the collectives of a layer, the embedding or the head of one layout."""
    one = {"embedding": embedding_moves, "layer": layer_moves, "head": head_moves}
    two = {"embedding": two_dim.embedding_moves, "layer": two_dim.layer_moves, "head": two_dim.head_moves}
    return (two if layout.tensor_inner > 1 else one)[unit](job, columns(layout))


def _counted(job: Job, layout: Layout, move: Move) -> Iterator[Call]:
    """Yield the calls of a collective over all micro-batches."""
    sizes = {"tp": layout.mesh.tp, "tp0": layout.mesh.tp // layout.tensor_inner, "tp1": layout.tensor_inner}
    each = max(job.compute_bytes, 4) if move.wide else job.compute_bytes
    times = int(move.times) * layout.accumulation
    if sizes[move.axis] == 1 or not times:
        return
    for start, stop in chunks(int(move.rows), int(move.pieces)):
        if stop > start:
            yield Call(move.kind, (stop - start) * int(move.width) * each, sizes[move.axis], times)


def _sync(job: Job, layout: Layout, stages: Sequence[int], rank: int, shard: int) -> Iterator[Call]:
    """Yield the sums, once a step, of gradients of which ranks that hold the same parameter have parts each."""
    held = _summed(job, layout, stages)
    sums: dict[tuple[int, ...], int] = {}
    for row in held:
        holders = row.holders(rank, layout.mesh.tp)
        local = [sum(stop - start for start, stop in ranges) for ranges in row.spans(rank)]
        rows = shard_rows(local[0], layout.mesh.dp_shard if layout.zero else 1, shard)
        if len(holders) > 1:
            sums[holders] = sums.get(holders, 0) + (rows.stop - rows.start) * prod(local[1:])
    for holders, elements in sums.items():
        if elements:
            yield Call("all_reduce", elements * job.master_bytes, len(holders), 1)


def _summed(job: Job, layout: Layout, stages: Sequence[int]) -> list[Partition]:
    """Return the trained parameters on some stages whose gradients are summed over tensor ranks."""
    partition = own_partition(job.model, layout.mesh.tp, layout.tensor_inner, layout.sequence_norms)
    infos = [info.name for info in _on_stages(job, layout, stages) if not is_frozen(info.name, job.frozen)]
    return [row for row in by_name(partition, infos).values() if row.gradients == "summed"]


def _on_stages(job: Job, layout: Layout, stages: Sequence[int]) -> Iterator[ParameterInfo]:
    first, *layers, last = groups(job.model)
    for stage in stages:
        start, stop = layout.stages[stage]
        for group in layers[start:stop]:
            yield from group
        yield from first if stage == 0 else ()
        yield from last if stage == len(layout.stages) - 1 else ()


def _different(job: Job, layout: Layout) -> list[int]:
    """Return tensor ranks that together stand for all: of those that hold as much of what is summed, one."""
    everywhere = range(len(layout.stages))
    seen: dict[tuple[object, ...], int] = {}
    rows = _summed(job, layout, everywhere)
    for rank in range(layout.mesh.tp):
        key = tuple((len(row.holders(rank, layout.mesh.tp)), row.spans(rank)) for row in rows[:64])
        seen.setdefault(key, rank)
    return list(seen.values())

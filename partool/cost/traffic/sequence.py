"""Bytes that ranks of one sequence send to each other for attention per step, from the elements of each method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from partool.cost import tensor_shares
from partool.cost.kinds import axis_of, kinds
from partool.cost.sequence import dsp as sequence_dsp
from partool.cost.sequence.price import price_of
from partool.cost.sequence.types import NOTHING, AttentionSizes, Sent, SentParts, SequenceTeams
from partool.cost.time.pipeline import stages_of_ranks
from partool.layout.grid import Axis, Turn, turns
from partool.plan.layout import Layout
from partool.strategies.sequence import METHODS
from partool.work.base import Workload

MANY = 64
"""Maximum number of ranks per sequence at which the sent elements of every rank are counted."""


def sequence_bytes(job: Workload, layout: Layout, turns: float = 1.0) -> int:
    """Return the bytes that the busiest rank sends per step, over all micro-batches and passes; 0 for one rank.

    ``turns`` says how often forward and backward passes run for a micro-batch. Recomputing the core of attention
    repeats the exchanges within it; recomputing whole layers also repeats the exchanges before and after the core.
    DSP's exchanges before and after layers are never repeated.
    """
    if layout.mesh.cp == 1:
        return 0
    most = max(_busiest_bytes(job, layout, stages) for stages in stages_of_ranks(layout))
    return round(layout.derived.accumulation * turns * most)


def _busiest_bytes(job: Workload, layout: Layout, stages: Sequence[int]) -> int:
    """Return the bytes that the busiest of the ranks that run ``stages`` sends for one micro-batch."""
    bounds = [layout.pipeline.bounds[stage] for stage in stages]
    team, kind_of = SequenceTeams.of(job, layout), kinds(job.model)
    if METHODS[team.method].on_grids:
        tensor = layout.mesh.tp if layout.tensor.sequence_norms else 1
        return layout.micro_batch * max(
            sum(sent.bytes(job.compute_bytes)[: 1 + job.backward])
            for sent in _turns(job, layout.mesh.cp, bounds, tensor)
        )
    heads, totals = heads_of(job, layout), [0] * len(looked_at(team.ranks))
    counted = Counter((kind_of[at].window, layout.recompute[at]) for bound in bounds for at in range(*bound))
    for (window, policy), layers in counted.items():
        repeated = (policy in ("attention", "full"), policy == "full")
        for index, parts in enumerate(sent_by_rank(team, heads._replace(window=window))):
            for part, repeats in zip(parts, repeated, strict=True):
                forward, backward = part.bytes(job.compute_bytes)
                totals[index] += layers * ((1 + repeats) * forward + job.backward * backward)
    return layout.micro_batch * max(totals)


def _turns(job: Workload, ranks: int, bounds: list[tuple[int, int]], tensor: int) -> list[Sent]:
    """Return how many elements each rank of DSP sends; all pipeline stages begin and end with the same axis sharded."""
    grid = job.model.grid
    if grid is None:
        return [NOTHING]
    ways: Counter[Axis] = Counter()
    for bound in bounds:
        axes = [axis for at in range(*bound) if (axis := axis_of(job.model, at)) is not None]
        ways.update(way for turn in turns(axes) for way in turn if way is not None)
    hidden = job.model.hidden
    return [
        Sent(
            *(
                hidden * sum(times * getattr(sent[way], name) for way, times in ways.items())
                for name in ("forward", "backward")
            )
        )
        for sent in _turned(grid, ranks, tensor)
    ]


@lru_cache(maxsize=256)
def _turned(grid: tuple[int, int], ranks: int, tensor: int) -> tuple[dict[Axis, Sent], ...]:
    """Return how many elements each rank sends to get full rows, and full columns, of a hidden state of width 1.

    Where ``tensor`` tensor ranks share the tokens of each sequence rank, elements of all ``ranks`` × ``tensor`` ranks
    are counted.
    """
    ways: tuple[Axis, Axis] = ("row", "column")
    return tuple(
        {way: sequence_dsp.sent(grid, ranks, rank, Turn(way, None), 1, tensor=tensor) for way in ways}
        for rank in looked_at(ranks * tensor)
    )


def heads_of(job: Workload, layout: Layout) -> AttentionSizes:
    """Return the sizes of attention over one sequence on the tensor rank with the most heads."""
    model = job.model
    queries, keys = (int(each) for each in tensor_shares.heads(model, layout.mesh.tp))
    if model.mla:
        return AttentionSizes(1, queries, keys, model.mla.qk_head_dim, model.mla.v_head_dim)
    return AttentionSizes(1, queries, keys, model.head_dim, model.head_dim)


def looked_at(ranks: int) -> tuple[int, ...]:
    """Return the ranks whose elements are counted: all, or if there are many, ranks at both ends and in the middle."""
    if ranks <= MANY:
        return tuple(range(ranks))
    middle = ranks // 2
    return (0, 1, middle - 1, middle, middle + 1, ranks - 2, ranks - 1)


@lru_cache(maxsize=1024)
def sent_by_rank(team: SequenceTeams, heads: AttentionSizes) -> tuple[SentParts, ...]:
    """Return how many elements each rank of :func:`looked_at` sends in one layer's forward and backward pass."""
    every = team.shares
    price = price_of(team.method)
    return tuple(price.parts(team, every, heads, rank) for rank in looked_at(team.ranks))

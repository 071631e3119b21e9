"""Bytes and calls of tensor ranks in a step: those of its passes, and the sums of partial gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from partool.cost.time.pipeline import stages_of_ranks
from partool.cost.traffic.tensor import CollectiveCall, pass_calls
from partool.layout.mesh import shard_rows
from partool.layout.parameters import groups, is_frozen
from partool.layout.tensor import Partition, by_name, own_partition
from partool.plan.layout import Layout
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork


def tensor_bytes(job: TrainingWork, layout: Layout) -> int:
    """Return the bytes that the busiest rank sends per step to the ranks that share its matrices."""
    if layout.mesh.tp == 1:
        return 0
    rank_bytes = []
    for stages in stages_of_ranks(layout):
        passes = sum(call.sent_bytes for call in pass_calls(job, layout, stages))
        if job.perturbed:
            ascent = pass_calls(job, layout, stages, ascent=True)
            passes += round(job.perturbed * sum(call.sent_bytes for call in ascent))
        sums = (sync_calls(job, layout, stages, rank, 0) for rank in _different(_Cut.of(job, layout)))
        rank_bytes.append(passes + max(sum(call.sent_bytes for call in calls) for calls in sums))
    return max(rank_bytes)


class _Cut(NamedTuple):
    """Settings that decide which parts of parameters tensor ranks hold and train."""

    model: ModelConfig
    frozen: tuple[str, ...]
    ranks: int
    inner: int
    sequence_norms: bool

    @classmethod
    def of(cls, job: TrainingWork, layout: Layout) -> _Cut:
        """Return the settings of a layout."""
        return cls(job.model, job.frozen, layout.mesh.tp, layout.tensor.inner, layout.tensor.sequence_norms)


def sync_calls(
    job: TrainingWork, layout: Layout, stages: Sequence[int], rank: int, shard: int
) -> Iterator[CollectiveCall]:
    """Yield the collectives that sum partial gradients once a step, over the ranks that hold the same parameter."""
    shards = layout.mesh.dp_shard * layout.mesh.cp if layout.data.zero else 1
    first, *layers, last = _sums(_Cut.of(job, layout), shards, rank, shard)
    held_groups = [layers[layer] for stage in stages for layer in range(*layout.pipeline.bounds[stage])]
    held_groups += [first] * (0 in stages) + [last] * (len(layout.pipeline.bounds) - 1 in stages)
    sums: Counter[tuple[int, ...]] = Counter()
    for group in held_groups:
        sums.update(dict(group))
    for holders, elements in sums.items():
        if elements:
            yield CollectiveCall("all_reduce", elements * job.master_bytes, len(holders), 1)


# Results are cached, as plans price hundreds of layouts of one model with hundreds of parameters.
@lru_cache(maxsize=256)
def _summed(cut: _Cut) -> tuple[tuple[Partition, ...], ...]:
    """Return, by group, the trained parameters whose gradients are summed over tensor ranks."""
    partition = own_partition(cut.model, cut.ranks, cut.inner, cut.sequence_norms)
    summed = []
    for group in groups(cut.model):
        names = [info.name for info in group if not is_frozen(info.name, cut.frozen)]
        summed.append(tuple(row for row in by_name(partition, names).values() if row.gradients == "summed"))
    return tuple(summed)


@lru_cache(maxsize=1024)
def _sums(cut: _Cut, shards: int, rank: int, shard: int) -> tuple[tuple[tuple[tuple[int, ...], int], ...], ...]:
    """Return, by group, the number of elements in the rank's shard for each set of ranks with the same parameters."""
    by_group = []
    for group in _summed(cut):
        sums: Counter[tuple[int, ...]] = Counter()
        for row in group:
            holders = row.holders(rank, cut.ranks)
            local = [sum(stop - start for start, stop in ranges) for ranges in row.spans(rank)]
            rows = shard_rows(local[0], shards, shard)
            if len(holders) > 1:
                sums[holders] += (rows.stop - rows.start) * prod(local[1:])
        by_group.append(tuple(sums.items()))
    return tuple(by_group)


@lru_cache(maxsize=256)
def _different(cut: _Cut) -> tuple[int, ...]:
    """Return one tensor rank of each set of ranks whose sums have the same sizes."""
    seen: dict[object, int] = {}
    for rank in range(cut.ranks):
        sums = [[(len(holders), elements) for holders, elements in group] for group in _sums(cut, 1, rank, 0)]
        seen.setdefault(str(sums), rank)
    return tuple(seen.values())

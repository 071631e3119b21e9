"""Count the heads, widths and parameters on the fullest tensor rank, and ranks of the residual stream, as columns.

:mod:`partool.layout.tensor` decides uneven parts; the largest part decides how long a step takes and what fits.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from partool.cost.case import Column, Layouts
from partool.cost.kinds import layer_places
from partool.layout.matrices import takes_whole_matrices
from partool.layout.parameters import ParameterInfo, groups
from partool.layout.quantised import FewBits, weighed
from partool.layout.tensor import Partition, by_name, own_partition
from partool.spec.model import ModelConfig
from partool.work.base import Workload


def width(size: Column, ranks: Column) -> Column:
    """Return the largest part of a width of ``size`` that is split over ``ranks``."""
    return -(-size // ranks)


def outer(layouts: Layouts) -> Column:
    """Return the number of ranks that share the outputs of a layer's first matrices: d1; with one dimension, ``tp``."""
    return layouts.tp // layouts.tensor_inner


def heads(model: ModelConfig, ranks: Column) -> tuple[Column, Column]:
    """Return the maximum number of query heads on a rank, and the maximum number of key-value heads.

    Latent attention has as many key-value heads as query heads.
    """
    kv_heads = model.heads if model.mla else model.kv_heads
    group = model.heads // kv_heads
    keys = width(kv_heads, ranks)
    if group == 1:
        return keys, keys
    # With fewer key heads than ranks, several consecutive ranks share the query heads of one key head.
    shared = width(group, np.maximum(ranks // kv_heads, 1))
    return np.where(kv_heads >= ranks, keys * group, shared), keys


def stream(job: Workload, layouts: Layouts) -> Column:
    """Return the number of tensor ranks that the residual stream is sharded over."""
    stack = job.stack
    if stack.sequence_parallel is not None:
        return layouts.tp if stack.sequence_parallel else 1
    return np.where(np.asarray(layouts.sequence_norms) == 1, layouts.tp, layouts.tensor_inner)


class Share(NamedTuple):
    """Numbers of elements of one group of parameters, on the tensor rank that has the most elements."""

    common: float
    """Number of elements outside of experts."""
    expert: float
    """Number of elements of experts if experts are sharded over tensor ranks."""
    whole_expert: float
    """Number of elements of experts on all tensor ranks together."""
    summed: float
    """Number of elements whose gradients are summed over tensor ranks once a step."""
    matrices: float = 0
    """Part of ``common`` that an optimizer of whole matrices updates."""


class Shares(NamedTuple):
    """Shares of each kind of group; the parameters of one group are all-gathered together."""

    embedding: Share
    layers: tuple[Share, ...]
    """Shares of one dense layer, and of one layer of each shape of experts (:attr:`partool.cost.kinds.Kind.place`);
    zeros if the model has no layer of that kind."""
    head: Share


@lru_cache(maxsize=256)
def shares(  # noqa: PLR0917 - a cached function of plain values
    model: ModelConfig,
    padded_vocab: int | None,
    tensor: int,
    inner: int,
    sequence_norms: bool,
    few_bits: FewBits | None = None,
) -> Shares:
    """Return the numbers of elements of each group on the fullest of ``tensor`` ranks.

    A matrix in few bits counts as fewer elements, of as many bytes.
    """
    places = layer_places(model)
    first = [places.index(kind) if kind in places else None for kind in range(1 + len(model.expert_shapes))]
    # Layers after the first of each kind have the same sizes, and cutting the parameters of all layers takes long.
    changes: dict[str, object] = {"layers": 1 + max(at for at in first if at is not None)}
    changes |= {} if padded_vocab is None else {"vocab": padded_vocab}
    model = model.model_copy(update=changes)
    by_group = groups(model)
    partition = own_partition(model, tensor, inner, sequence_norms)

    def share(infos: list[ParameterInfo]) -> Share:
        return _share(infos, by_name(partition, [info.name for info in infos]), tensor, few_bits)

    layers = [Share(0, 0, 0, 0) if at is None else share(by_group[1 + at]) for at in first]
    return Shares(share(by_group[0]), tuple(layers), share(by_group[-1]))


def _share(infos: list[ParameterInfo], rows: dict[str, Partition], tensor: int, few_bits: FewBits | None) -> Share:
    common, expert, summed, matrices = ([0.0 if few_bits else 0] * tensor for _ in range(4))
    for info in infos:
        row = rows.get(info.name)
        target = expert if info.kind == "expert" else common
        for rank in range(tensor):
            elements: float = info.elements if row is None else _elements_of_rank(row, rank)
            if few_bits is not None:
                elements *= weighed(info, few_bits) / max(info.elements, 1)
            target[rank] += elements
            matrices[rank] += elements * (target is common and takes_whole_matrices(info))
            summed[rank] += elements * (row is not None and row.gradients == "summed")
    expert_elements = sum(weighed(info, few_bits) for info in infos if info.kind == "expert")
    return Share(max(common), max(expert), expert_elements, max(summed), max(matrices))


def _elements_of_rank(row: Partition, rank: int) -> int:
    return prod(sum(stop - start for start, stop in ranges) for ranges in row.spans(rank))


class ShareColumns(NamedTuple):
    """:class:`Shares` of many layouts; columns are numbers of each group's elements outside and inside of experts."""

    embedding: Column
    layers: tuple[tuple[Column, Column], ...]
    """For a dense layer and for a layer of each shape of experts: number of elements outside of experts, and that of
    experts (of the fullest of the ranks that share experts where there are any, else of the tensor rank's shards)."""
    head: Column
    summed: tuple[Column, tuple[Column, ...], Column]
    """Numbers of elements of embedding, layers and head whose gradients are summed over tensor ranks once a step."""
    matrices: tuple[Column, ...]
    """For a dense layer and for a layer of each shape of experts, number of elements outside of experts that an
    optimizer of whole matrices updates."""


def share_columns(job: Workload, layouts: Layouts) -> ShareColumns:
    """Return the numbers of elements of each group on the fullest tensor rank, under each layout."""
    tp, inner, norms = (np.asarray(c) for c in (layouts.tp, layouts.tensor_inner, layouts.sequence_norms))
    code = (tp * 4096 + inner) * 2 + norms
    cases = sorted(set(code.ravel().tolist()))
    table = [
        shares(job.model, job.padded_vocab, one // 8192, one // 2 % 4096, bool(one % 2), job.few_bits) for one in cases
    ]
    index = np.searchsorted(np.array(cases), code)

    def column(values: list[float]) -> Column:
        return values[0] if len(values) == 1 else np.array(values)[index]

    def outside(kind: str) -> Column:
        cut = [one.embedding if kind == "embedding" else one.head for one in table]
        return column([share.common for share in cut])

    layers = []
    every_kind = range(len(table[0].layers))
    for kind in every_kind:
        of_kind = [one.layers[kind] for one in table]
        expert_elements = of_kind[0].whole_expert
        expert: Column = 0.0
        if expert_elements and (moe := job.model.expert_shapes[kind - 1].moe) is not None:
            size, parts = moe.ffn_hidden, np.asarray(layouts.etp)
            shared = expert_elements / size * width(size, parts) / layouts.ep
            expert = np.where(layouts.ep > 1, shared, column([share.expert for share in of_kind]))
        layers.append((column([share.common for share in of_kind]), expert))
    summed = (
        column([one.embedding.summed for one in table]),
        tuple(column([one.layers[kind].summed for one in table]) for kind in every_kind),
        column([one.head.summed for one in table]),
    )
    matrices = tuple(column([one.layers[kind].matrices for one in table]) for kind in every_kind)
    return ShareColumns(outside("embedding"), tuple(layers), outside("head"), summed, matrices)

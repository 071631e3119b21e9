"""Layers, parameters and in-flight micro-batches of one pipeline rank, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import HALVED_RING, Column, Layouts, Mask, among
from partool.cost.kinds import layer_places, places_of
from partool.cost.memory.in_flight import handed_over
from partool.cost.tensor_shares import share_columns
from partool.layout.matrices import takes_whole_matrices
from partool.layout.parameters import ParameterInfo, groups, is_frozen, layer_parameters
from partool.layout.quantised import FewBits, weighed
from partool.spec.model import ModelConfig
from partool.work.base import Workload

DENSE, MOE = 0, 1
"""Indices of the kinds of layers: dense layers, and layers with experts. Where experts differ by layer, each shape of
them is a kind, from ``MOE`` on (:attr:`partool.cost.kinds.Kind.place`)."""


class Elements(NamedTuple):
    """Number of elements of a group of parameters, counted separately for each way in which elements are sharded."""

    cut: float
    """Number of elements sharded by tensor parallelism."""
    replicated: float
    """Number of elements of norms and routers; every tensor rank has all of them."""
    expert: float
    """Number of elements sharded by both expert and tensor parallelism."""


@dataclass(frozen=True)
class GatherGroups:
    """The model's groups of parameters; the parameters of one group are all-gathered together."""

    embedding: Elements
    layers: tuple[Elements, ...]
    """Elements of one dense layer, and of one layer of each kind with experts; zeros where the model has none."""
    head: Elements
    """Elements of the final norm and the head; only those of the norm if embeddings are tied."""
    trained_embedding: float = 1.0
    """Share of the embedding's elements that is trained."""
    trained_layers: tuple[float, ...] = (1.0, 1.0)
    """Share of elements that is trained: the mean over dense layers, and over layers of each kind with experts."""
    trained_head: float = 1.0
    trained_matrices: tuple[float, ...] = (1.0, 1.0)
    """As ``trained_layers``, of the elements that an optimizer of whole matrices updates."""


@dataclass(frozen=True)
class WeightRing:
    """Tensors that a rank holds in a pipeline that passes weights from rank to rank; every field is a column."""

    passes_weights: Mask
    """True where weights are passed from rank to rank; elsewhere the other fields have no meaning."""
    inputs: Column
    """Number of stage inputs kept at the peak, counted per micro-batch."""
    rebuilt: tuple[Column, ...]
    """For each kind, number of layers whose tensors exist during a backward pass. These are the layers of one stage, or
    of all stages if weight gradients are computed later than input gradients."""
    weights: Column
    """Number of flat copies of a stage's weights, in addition to the weights of the stages that the rank owns."""
    gradients: Column
    """Number of flat copies of a stage's gradients."""
    elements: Column
    """Number of parameters of the largest stage."""


@dataclass(frozen=True)
class BegunStages:
    """A moment of ranks whose stages get their gradients one after the other; every field is a column."""

    share: Column
    """Share of a rank's stages that have gradients."""
    in_flight: Column
    """Micro-batches in flight at most, counted as in :class:`RankLoad`; 0 where a rank has no such moment."""
    ending: Column
    """Micro-batches between the last stage's forward and backward passes."""


@dataclass(frozen=True)
class RankLoad:
    """Layers, parameters and micro-batches of one pipeline rank, as columns."""

    layers: tuple[Column, ...]
    """Number of dense layers, and of layers of each kind with experts; of a dense model two, the second 0."""
    first: Column
    """1 where the rank holds the embedding as the input of the first layer."""
    last: Column
    """1 where the rank holds the head."""
    in_flight: Column
    """Number of micro-batches whose activations of all the rank's layers exist at the peak; may be a fraction."""
    kept: dict[tuple[int, int], Column]
    """Number of layers by (kind, index of the recompute policy)."""
    ring: WeightRing | None = None
    """Tensors held to pass weights from rank to rank; None if no layout passes weights."""
    larger: Column = 1.0
    """Ratio of the layers whose activations exist at the peak to the layers of as many activations of mean stages."""
    local_inputs: Column | None = None
    """Number of stage inputs in flight that are no messages; None stands for a closed form."""
    ending: Column | None = None
    """Micro-batches at the peak between the last stage's passes; None stands for a closed form."""
    begun: tuple[BegunStages, ...] = ()
    """Moments with gradients of some of the stages, and of all; empty stands for a closed form."""

    @property
    def layer_count(self) -> Column:
        """Number of layers of all kinds together."""
        return sum(self.layers)

    @property
    def expert_layers(self) -> Column:
        """Number of layers with experts."""
        return sum(self.layers[MOE:])


@lru_cache(maxsize=16)
def model_groups(
    model: ModelConfig, padded_vocab: int | None, frozen: tuple[str, ...], few_bits: FewBits | None = None
) -> GatherGroups:
    """Return the model's groups of parameters; a matrix in few bits counts as fewer elements, of as many bytes."""
    rows = model if padded_vocab is None else model.model_copy(update={"vocab": padded_vocab})
    kinds: list[Elements] = []
    places = layer_places(model)
    for kind in range(MOE + len(model.expert_shapes)):
        infos = layer_parameters(model, places.index(kind)) if kind in places else []
        kinds.append(_elements(infos, few_bits))
    outer = groups(rows.model_copy(update={"layers": 1, "layer_types": ()}))
    every = (1.0,) * len(kinds)
    all_trained = GatherGroups(
        _elements(outer[0], few_bits), tuple(kinds), _elements(outer[-1], few_bits), trained_layers=every,
        trained_matrices=every,
    )  # fmt: skip
    return replace(all_trained, **_trained(model, frozen, few_bits)) if frozen else all_trained


def _elements(infos: Sequence[ParameterInfo], few_bits: FewBits | None) -> Elements:
    replicated = sum(weighed(info, few_bits) for info in infos if info.kind in ("norm", "router", "position"))
    expert = sum(weighed(info, few_bits) for info in infos if info.kind == "expert")
    return Elements(sum(weighed(info, few_bits) for info in infos) - replicated - expert, replicated, expert)


def _trained(model: ModelConfig, frozen: tuple[str, ...], few_bits: FewBits | None) -> dict[str, Any]:
    """Return the trained shares of the groups; for layers, the mean over all layers of a kind."""
    first, *layers, last = groups(model)
    kinds = [
        [info for place, layer in zip(layer_places(model), layers, strict=True) if place == kind for info in layer]
        for kind in range(MOE + len(model.expert_shapes))
    ]
    return {
        "trained_embedding": _share(first, frozen, few_bits),
        "trained_layers": tuple(_share(infos, frozen, few_bits) for infos in kinds),
        "trained_head": _share(last, frozen, few_bits),
        "trained_matrices": tuple(
            _share([info for info in infos if takes_whole_matrices(info)], frozen, few_bits) for infos in kinds
        ),
    }


def _share(infos: Sequence[ParameterInfo], frozen: tuple[str, ...], few_bits: FewBits | None) -> float:
    elements = sum(weighed(info, few_bits) for info in infos)
    return 1.0 - sum(weighed(info, few_bits) for info in infos if is_frozen(info.name, frozen)) / max(elements, 1)


def load_of_rank(job: Workload, layouts: Layouts, rank: Column, in_flight: Column) -> RankLoad:
    """Return the load of the pipeline rank ``rank`` (a column) if layers are split as evenly as possible.

    ``in_flight`` counts micro-batches of one chunk, as :func:`partool.cost.memory.in_flight.in_flight` does.
    """
    layers = job.model.layers
    pp, chunks = layouts.pp, layouts.chunks
    each, odd = np.divmod(layers, pp * chunks)
    extra = np.clip(np.ceil((odd - rank) / pp), 0, chunks)
    if np.any(layouts.folded):
        folded = sum((stage < odd) & exists for stage, exists in _stages_of_rank(layouts, rank))
        extra = np.where(layouts.folded, folded, extra)
    count = each * chunks + extra
    with_experts = places_of(job.model)[MOE:]
    moe = [_layers_of_rank(job.model, layouts, rank, (each, odd), kind) for kind in with_experts] or [0]
    kinds = (count - sum(moe), *moe)
    # The first layers of the rank follow the policy; their number is the share rounded up.
    under = np.ceil(layouts.recompute_share * count - 1e-9) / np.maximum(count, 1)
    kept: dict[tuple[int, int], Column] = {}
    policies = sorted({0, *np.asarray(layouts.recompute).ravel().tolist()})
    for kind in places_of(job.model):
        for policy in policies:
            chosen = np.where(layouts.recompute == policy, 1.0 if policy == 0 else under, 0.0)
            if policy == 0:
                chosen = np.where(layouts.recompute != 0, 1.0 - under, chosen)
            kept[kind, policy] = kinds[kind] * chosen
    first = np.where((rank == 0) | layouts.ring, 1, 0)
    # With an even number of chunks, folded stages end on the rank where they began.
    last = np.where((rank == np.where(layouts.folded & (chunks % 2 == 0), 0, pp - 1)) | layouts.ring, 1, 0)
    ring = _ring(job, layouts, each + (odd > 0)) if np.any(layouts.ring) else None
    local_inputs = handed_over(layouts, rank, in_flight) if np.any(layouts.folded) else None
    return RankLoad(kinds, first, last, in_flight / chunks, kept, ring, local_inputs=local_inputs)


def _ring(job: Workload, layouts: Layouts, most: Column) -> WeightRing:
    """Return the numbers of tensors that a rank holds to pass weights on, if a stage has at most ``most`` layers."""
    places = layer_places(job.model)
    shares = [places.count(kind) / job.model.layers for kind in range(MOE + len(job.model.expert_shapes))]
    layers = np.where(among(layouts.schedule, HALVED_RING), job.model.layers, most)
    each = [common + expert for common, expert in share_columns(job, layouts).layers]
    stages = layouts.pp * layouts.chunks
    return WeightRing(layouts.ring, stages, tuple(share * layers for share in shares), np.minimum(stages - 1, 2), 2,
                most * sum(share * one for share, one in zip(shares, each, strict=True)))  # fmt: skip


def _layers_of_rank(
    model: ModelConfig, layouts: Layouts, rank: Column, split: tuple[Column, Column], kind: int
) -> Column:
    """Return the layers of a kind on pipeline rank ``rank``; ``split`` is layers per stage, stages with one more."""
    each, odd = split
    running = np.concatenate([[0], np.cumsum([place == kind for place in layer_places(model)])])
    total: Column = 0
    for stage, exists in _stages_of_rank(layouts, rank):
        start = stage * each + np.minimum(stage, odd)
        stop = start + each + (stage < odd)
        expert_layers = running[np.clip(stop, 0, model.layers)] - running[np.clip(start, 0, model.layers)]
        total = total + np.where(exists, expert_layers, 0)
    return total


def _stages_of_rank(layouts: Layouts, rank: Column) -> Iterator[tuple[Column, Mask]]:
    """Yield, for each chunk of a rank, the chunk's stage and a mask of the layouts that have this chunk."""
    pp = layouts.pp
    for chunk in range(int(np.max(layouts.chunks))):
        mirrored_rank = pp - 1 - rank if chunk % 2 else rank
        yield chunk * pp + np.where(layouts.folded, mirrored_rank, rank), chunk < layouts.chunks

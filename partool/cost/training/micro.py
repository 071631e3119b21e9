"""Cost of one micro-batch in a stage: its layers by kind, embedding and head, with their communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts
from partool.cost.kinds import Kind, kinds, trained_matrices
from partool.cost.repeats import Memo, codes, distinct
from partool.cost.tensor_shares import share_columns
from partool.cost.time import tensor as tensor_time
from partool.cost.time.head import computes_late, embedding_s, head_s, perturbation_s
from partool.cost.time.layer import BareCases, BarePasses, Layer, layer
from partool.cost.time.layer_pass import LayerPass
from partool.cost.traffic.tensor import halves_passes, keeps_gathered
from partool.layout.parameters import is_frozen, layer_parameters
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork

COMMUNICATION = ("tensor_parallel", "sequence_parallel", "expert_parallel")


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds that a layer of one kind, the embedding or the head takes per micro-batch, with exposed communication."""

    forward_s: Column
    backward_s: Column
    """Seconds of the backward pass, recomputation included."""
    weight_s: Column
    """Seconds that the backward pass spends on weight gradients, which a zero-bubble schedule may postpone."""
    exposed: dict[str, Column]
    """Exposed seconds of both passes, by time term."""
    exposed_forward_s: Column
    """Exposed seconds of the forward pass, all terms together."""
    dense: Column
    """Number of a rank's parameters outside experts; all data-parallel ranks share these parameters."""
    expert: Column
    """Number of parameters in a rank's experts."""
    summed: Column = 0.0
    """Number of parameters whose gradients are partial sums on each tensor rank."""
    recompute_s: Column = 0.0
    """Seconds of the backward pass that recompute parts of the forward pass."""

    @property
    def both_s(self) -> Column:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Micro:
    """Cost of one micro-batch in the embedding, in one layer of each kind, and in the head."""

    layers: dict[Kind, UnitSeconds]
    counts: dict[Kind, int]
    """Number of layers of each kind."""
    first: UnitSeconds
    """Cost of the embedding."""
    last: UnitSeconds
    """Cost of final norm, head and loss."""
    passes: dict[Kind, Layer]
    """Passes of one layer of each kind, with seconds by kind of work."""

    def total(self, name: str) -> Column:
        """Return the sum of the field ``name`` over the whole model."""
        layers = [count * getattr(self.layers[kind], name) for kind, count in self.counts.items()]
        model_total: Column = sum(layers) + getattr(self.first, name) + getattr(self.last, name)
        return model_total


def micro(job: TrainingWork, layouts: Layouts) -> Micro:
    """Return the cost of one micro-batch under each layout.

    Layouts that differ only in fields that do not affect a micro-batch are computed once per job. Results for columns
    of layouts have no ``passes``.
    """
    shape, memo = layouts.shape, job.memo.setdefault("micro", _PricedMicros())
    if not shape:
        key = tuple(float(column) for column in _case(job, layouts))
        if key not in memo.single:
            memo.single[key] = _micro(job, layouts, memo.passes)
        cached: Micro = memo.single[key]
        return cached
    if shape[0] < _FEW:
        return _repeated(job, layouts, memo.many)
    first, where = cases(job, layouts)
    return _repeated(job, layouts.take(first), memo.many, where)


def cases(job: TrainingWork, layouts: Layouts) -> tuple[Any, Any]:
    """Return the first of the layouts of each case of a micro-batch and pipeline, and the place of each among these."""
    columns = [layouts.pp, computes_late(layouts), *(getattr(layouts, name) for name in _CASE)]
    if np.any(np.asarray(layouts.tp) > 1):
        columns.append(keeps_gathered(job, layouts))
    return distinct(codes(layouts.shape[0], columns))


_FEW = 512
"""Minimum number of layouts for which a search for equal cases saves time."""


def _repeated(job: TrainingWork, layouts: Layouts, memo: Memo, where: Any = slice(None)) -> Micro:
    """Return the costs at the places ``where`` of layouts, computing only cases that are not in the memo."""
    counts = Counter(kinds(job.model))
    columns = memo.results(codes(layouts.shape[0], _case(job, layouts)), partial(_computed, job, layouts))
    rows = iter(columns[:, where])
    layers = {kind: _unit_of(rows) for kind in counts}
    return Micro(layers, dict(counts), _unit_of(rows), _unit_of(rows), {})


def prepare(job: TrainingWork, layouts: Layouts) -> None:
    """Compute the costs of a micro-batch under many layouts at once, for later calls of :func:`micro`."""
    memo: Memo = job.memo.setdefault("micro", _PricedMicros()).many
    memo.learn(codes(layouts.shape[0], _case(job, layouts)), partial(_computed, job, layouts))


def _computed(job: TrainingWork, layouts: Layouts, rows: Any) -> list[Column]:
    """Return the columns of all units of the layouts at the indices ``rows``."""
    costs = _micro(job, layouts.take(rows), {})
    units = (*costs.layers.values(), costs.first, costs.last)
    return [column for unit in units for column in _columns(unit)]


class _PricedMicros:
    """Costs of the cases that one job has priced so far."""

    def __init__(self) -> None:
        self.single: dict[tuple[float, ...], Micro] = {}
        self.passes: dict[Any, BarePasses] = {}
        """Passes of single layouts' layers without what they recompute."""
        self.many = Memo()


_CASE = (
    "compiled", "cp", "tp", "ep", "etp", "expert_exchange", "micro_batch", "recompute", "recompute_share",
    "sequence_method", "sequence_order", "sequence_inner", "sequence_teams", "sequence_inside", "mlp_tile_tokens",
    "loss_tile_tokens", "tensor_inner", "sequence_norms", "tensor_overlap", "tensor_chunks",
)  # fmt: skip
"""Names of the columns of layouts that affect the cost of a micro-batch, besides those of the pipeline."""


_BARE_CASE = tuple(name for name in _CASE if name not in ("recompute", "recompute_share"))
"""The same without what only decides what is recomputed."""


def _case(job: TrainingWork, layouts: Layouts, names: Sequence[str] = _CASE) -> list[Any]:
    """Return the columns on which the cost of a micro-batch depends.

    Of a pipeline these are whether there is one, whether its schedule splits backward passes, and whether the loss has
    to wait for other micro-batches.
    """
    several = np.asarray(layouts.pp) > 1
    pipeline = (several, computes_late(layouts), halves_passes(job, layouts))
    return [*pipeline, *(getattr(layouts, name) for name in names)]


_PLAIN = ("forward_s", "backward_s", "weight_s", "exposed_forward_s", "dense", "expert", "summed", "recompute_s")


def _columns(unit: UnitSeconds) -> list[Column]:
    return [*(getattr(unit, name) for name in _PLAIN), *(unit.exposed[name] for name in COMMUNICATION)]


def _unit_of(rows: Iterator[Column]) -> UnitSeconds:
    """Return the unit whose columns, in the order of :func:`_columns`, come next in ``rows``."""
    plain = {name: next(rows) for name in _PLAIN}
    return UnitSeconds(**plain, exposed={name: next(rows) for name in COMMUNICATION})


def _micro(job: TrainingWork, layouts: Layouts, priced: dict[Any, BarePasses]) -> Micro:
    counts, bare = Counter(kinds(job.model)), BareCases(_case(job, layouts, _BARE_CASE), priced)
    shares = {kind: trained_matrices(job.model, job.frozen, moe=kind.moe, shape=kind.shape) for kind in counts}
    more = job.reference_passes
    passes = {
        kind: layer(job, layouts, kind, job.perturbed, shares[kind], more_forward=more, bare=bare) for kind in counts
    }
    if not job.backward:
        no_pass = LayerPass(exposed=dict.fromkeys(COMMUNICATION, 0.0))
        passes = {kind: Layer(costs.forward, no_pass, no_pass) for kind, costs in passes.items()}
    units = {kind: _unit(job, layouts, kind, costs) for kind, costs in passes.items()}
    return Micro(units, dict(counts), _first(job, layouts), _last(job, layouts), passes)


def _unit(job: TrainingWork, layouts: Layouts, kind: Kind, costs: Layer) -> UnitSeconds:
    recompute_s: Column = costs.recompute.total_s(job) if job.backward else 0.0
    backward: Column = costs.backward.total_s(job) + recompute_s if job.backward else 0.0
    exposed = {
        name: costs.forward.exposed[name] + costs.backward.exposed[name] + costs.recompute.exposed[name]
        for name in COMMUNICATION
    }
    shares = share_columns(job, layouts)
    dense, expert = shares.layers[kind.place]
    return UnitSeconds(
        forward_s=costs.forward.total_s(job),
        backward_s=backward,
        weight_s=np.minimum(0.5 * costs.backward.matmul_s, 0.5 * backward),
        exposed=exposed,
        exposed_forward_s=sum(costs.forward.exposed.values()),
        dense=dense,
        expert=expert,
        summed=job.backward * shares.summed[1][kind.place],
        recompute_s=recompute_s,
    )


def _first(job: TrainingWork, layouts: Layouts) -> UnitSeconds:
    unit = _embedding(job, layouts)
    return unit if job.teacher is None else _taught(unit, micro(job.teacher, layouts), job.taught)


def _taught(unit: UnitSeconds, teacher: Micro, share: float) -> UnitSeconds:
    """Return the embedding with the forward pass of a teacher in a share of the steps.

    A teacher runs before its student, in layouts of one pipeline stage. Its own loss stands for the divergence, which
    reads as many logits.
    """
    exposed = {
        name: unit.exposed[name]
        + share
        * (
            sum(count * teacher.layers[kind].exposed[name] for kind, count in teacher.counts.items())
            + teacher.first.exposed[name]
            + teacher.last.exposed[name]
        )
        for name in COMMUNICATION
    }
    return replace(
        unit,
        forward_s=unit.forward_s + share * teacher.total("forward_s"),
        exposed=exposed,
        exposed_forward_s=unit.exposed_forward_s + share * teacher.total("exposed_forward_s"),
    )


def _embedding(job: TrainingWork, layouts: Layouts) -> UnitSeconds:
    sent = tensor_time.embedding_seconds(job, layouts)
    trains = not is_frozen("embed.weight", job.frozen)
    shares = share_columns(job, layouts)
    unit = replace(
        _end(job, layouts, embedding_s, sent, shares.embedding, weights=trains),
        summed=job.backward * shares.summed[0],
    )
    # Embeddings are looked up again, but the pass that finds perturbations has no gradients of them.
    if job.perturbed:
        return _with_ascent(unit, perturbation_s(job, layouts), 0.0, sent.forward.total, job.perturbed)
    return _with_ascent(unit, 0.0, 0.0, sent.forward.total, job.reference_passes) if job.reference_passes else unit


def _last(job: TrainingWork, layouts: Layouts) -> UnitSeconds:
    shares = share_columns(job, layouts)
    elements: Column = shares.head
    if job.model.tied_embeddings:
        # The last stage has its own copy of a tied embedding.
        head = tensor_shares.width(job.model.vocab, layouts.tp) * job.model.hidden
        elements = elements + np.where(layouts.pp > 1, head, 0)
    sent = tensor_time.head_seconds(job, layouts)
    unit = replace(
        _end(job, layouts, head_s, sent, elements, weights=job.trains_head), summed=job.backward * shares.summed[2]
    )
    if job.reference_passes:
        return _with_ascent(unit, 0.0, 0.0, sent.forward.total, job.reference_passes)
    if not job.perturbed:
        return unit
    backward = head_s(job, layouts, backward=True, weights=False) + sent.backward.total
    return _with_ascent(unit, 0.0, backward, sent.forward.total + sent.backward.total, job.perturbed)


def _with_ascent(unit: UnitSeconds, more_s: Column, backward_s: Column, exposed_s: Column, share: float) -> UnitSeconds:
    """Return the embedding or the head with a second forward and backward pass in a share of the steps.

    Without ``backward_s`` it is a forward pass alone. ``more_s`` are further seconds of that forward pass,
    ``backward_s`` those of its backward pass, and ``exposed_s`` those of its communication.
    """
    exposed = unit.exposed | {"tensor_parallel": unit.exposed["tensor_parallel"] + share * exposed_s}
    return replace(
        unit,
        forward_s=unit.forward_s + share * (unit.forward_s + more_s),
        backward_s=unit.backward_s + share * backward_s,
        exposed=exposed,
        exposed_forward_s=unit.exposed_forward_s + share * unit.exposed_forward_s,
    )


def _end(
    job: TrainingWork,
    layouts: Layouts,
    seconds: Callable[..., Column],
    sent: tensor_time.TensorSeconds,
    elements: Column,
    *,
    weights: bool,
) -> UnitSeconds:
    """Return the cost of the embedding or the head, whose communication is all exposed.

    Without ``weights`` its matrix is frozen.
    """
    forward, shown = seconds(job, layouts, backward=False), sent.forward.total
    if not job.backward:
        exposed = {**dict.fromkeys(COMMUNICATION, 0.0), "tensor_parallel": shown}
        return UnitSeconds(forward + shown, 0.0, 0.0, exposed, shown, elements, 0.0)
    backward = seconds(job, layouts, backward=True, weights=weights)
    exposed = {**dict.fromkeys(COMMUNICATION, 0.0), "tensor_parallel": shown + sent.backward.total}
    weight = 0.5 * backward if seconds is head_s and weights else 0.0
    return UnitSeconds(forward + shown, backward + sent.backward.total, weight, exposed, shown, elements, 0.0)


@lru_cache(maxsize=64)
def layer_elements(model: ModelConfig, kind: Kind) -> tuple[int, int]:
    """Return the number of a layer's parameters outside its experts, and the number in its experts."""
    index = kinds(model).index(kind)
    infos = layer_parameters(model, index)
    expert = sum(info.elements for info in infos if info.kind == "expert")
    return sum(info.elements for info in infos) - expert, expert

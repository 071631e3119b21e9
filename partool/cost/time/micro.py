"""Cost of one micro-batch in a stage: its layers by kind, embedding and head, with their communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts, TrainingJob
from partool.cost.kinds import Kind, kinds
from partool.cost.tensor_shares import share_columns
from partool.cost.time import tensor as tensor_time
from partool.cost.time.layer import Layer, computes_late, embedding_s, head_s, layer
from partool.cost.traffic.tensor import keeps_gathered
from partool.layout.parameters import layer_parameters
from partool.spec.model import ModelConfig

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
    again_s: Column = 0.0
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
        found: Column = sum(layers) + getattr(self.first, name) + getattr(self.last, name)
        return found


def micro(job: TrainingJob, layouts: Layouts) -> Micro:
    """Return the cost of one micro-batch under each layout.

    Long columns of layouts repeat few cases: layouts that differ only in fields that do not affect a micro-batch are
    computed once. Results that were computed once for several layouts have no ``passes``.
    """
    rows = np.size(layouts.pp)
    if rows < _FEW:
        return _micro(job, layouts)
    # One code per case. Products wrap around; a collision among a few thousand cases has a probability of about 1e-12.
    code = np.zeros(rows, dtype=np.int64)
    cases = [*(getattr(layouts, name) for name in _CASE), computes_late(layouts)]
    if np.any(np.asarray(layouts.tp) > 1):
        cases.append(keeps_gathered(job, layouts))
    for factor, case in enumerate(cases, 3):
        column = np.broadcast_to(case, rows)
        column = column.astype(float).view(np.int64) if column.dtype.kind == "f" else column
        code = (code + column) * np.int64(0x9E3779B97F4A7C15 // factor | 1)
    _, first, where = np.unique(code, return_index=True, return_inverse=True)
    found = _micro(job, layouts.take(first))

    def spread(unit: UnitSeconds) -> UnitSeconds:
        return UnitSeconds(**{field.name: _spread(getattr(unit, field.name), where) for field in fields(unit)})

    units = {kind: spread(unit) for kind, unit in found.layers.items()}
    return Micro(units, found.counts, spread(found.first), spread(found.last), {})


_FEW = 512
"""Minimum number of layouts for which a search for equal cases saves time."""
_CASE = (
    "pp", "cp", "tp", "ep", "micro_batch", "recompute", "recompute_share", "sequence_method", "sequence_order",
    "sequence_inner", "sequence_teams", "sequence_inside", "mlp_tile_tokens", "loss_tile_tokens", "tensor_inner",
    "sequence_norms", "tensor_overlap", "tensor_chunks",
)  # fmt: skip
"""Names of the columns of layouts that affect the cost of a micro-batch."""


def _spread(value: Any, where: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spread(column, where) for name, column in value.items()}
    return value[where] if getattr(value, "ndim", 0) else value


def _micro(job: TrainingJob, layouts: Layouts) -> Micro:
    counts = Counter(kinds(job.model))
    passes = {kind: layer(job, layouts, kind) for kind in counts}
    units = {kind: _unit(job, layouts, kind, found) for kind, found in passes.items()}
    return Micro(units, dict(counts), _first(job, layouts), _last(job, layouts), passes)


def _unit(job: TrainingJob, layouts: Layouts, kind: Kind, found: Layer) -> UnitSeconds:
    again = found.again.total_s(job)
    backward = found.backward.total_s(job) + again
    exposed = {
        name: found.forward.exposed[name] + found.backward.exposed[name] + found.again.exposed[name]
        for name in COMMUNICATION
    }
    shares = share_columns(job, layouts)
    dense, expert = shares.layers[int(kind.moe)]
    return UnitSeconds(
        forward_s=found.forward.total_s(job),
        backward_s=backward,
        weight_s=np.minimum(0.5 * found.backward.matmul_s, 0.5 * backward),
        exposed=exposed,
        exposed_forward_s=sum(found.forward.exposed.values()),
        dense=dense,
        expert=expert,
        summed=shares.summed[1][int(kind.moe)],
        again_s=again,
    )


def _first(job: TrainingJob, layouts: Layouts) -> UnitSeconds:
    sent = tensor_time.embedding_seconds(job, layouts)
    shares = share_columns(job, layouts)
    return replace(_end(job, layouts, embedding_s, sent, shares.embedding), summed=shares.summed[0])


def _last(job: TrainingJob, layouts: Layouts) -> UnitSeconds:
    shares = share_columns(job, layouts)
    elements: Column = shares.head
    if job.model.tied_embeddings:
        # The last stage has its own copy of a tied embedding.
        head = tensor_shares.width(job.model.vocab, layouts.tp) * job.model.hidden
        elements = elements + np.where(layouts.pp > 1, head, 0)
    found = _end(job, layouts, head_s, tensor_time.head_seconds(job, layouts), elements)
    return replace(found, summed=shares.summed[2])


def _end(
    job: TrainingJob,
    layouts: Layouts,
    seconds: Callable[..., Column],
    sent: tensor_time.TensorSeconds,
    elements: Column,
) -> UnitSeconds:
    """Return the cost of the embedding or the head, whose communication is all exposed."""
    forward, backward = (seconds(job, layouts, backward=which) for which in (False, True))
    exposed = {**dict.fromkeys(COMMUNICATION, 0.0), "tensor_parallel": sent.forward.total + sent.backward.total}
    shown = sent.forward.total
    weight = 0.5 * backward if seconds is head_s else 0.0
    return UnitSeconds(forward + shown, backward + sent.backward.total, weight, exposed, shown, elements, 0.0)


@lru_cache(maxsize=64)
def layer_elements(model: ModelConfig, kind: Kind) -> tuple[int, int]:
    """Return the number of a layer's parameters outside its experts, and the number in its experts."""
    index = kinds(model).index(kind)
    infos = layer_parameters(model, index)
    expert = sum(info.elements for info in infos if info.kind == "expert")
    return sum(info.elements for info in infos) - expert, expert

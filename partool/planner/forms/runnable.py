"""Check whether the runtime can run one layout of a problem, or any layout of the problem.

A plan is described by aspects (``zero 3``, ``precision bf16``); :mod:`partool.layout.capabilities` lists the aspects
that the runtime supports. Aspects that follow from columns are computed by the same code for one layout and for
100,000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import BY_NODE, OVERLAPS, PADDED, RECOMPUTE, SCHEDULES, SEQUENCE_METHODS, Layouts, Mask, among
from partool.cost.codec import encode
from partool.layout.capabilities import GAPS, GATHERS, GRAPH_ALONE, Gap, of_model, runs
from partool.plan.layout import Layout
from partool.plan.types import Plan
from partool.planner.problem import Problem
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.training import Precision
from partool.strategies.engines import ENGINES, EngineRecord
from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import MOVING_WEIGHTS
from partool.strategies.sequence import BY_GRAPH, ON_GRIDS
from partool_kernels.registry import ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Task:
    """Requirements on the runtime that all layouts of a training share."""

    model: ModelConfig
    devices: Devices
    precision: Precision
    frozen: bool = False
    hf: bool = False
    """True if transformers or the user's code builds the model, False if partool does."""
    optimizer: str = "adamw"
    prefers: bool = False
    """True if the objective compares pairs of answers."""
    averages: bool = False
    """True if a moving average of the weights is kept."""
    continues: bool = False
    """True if validations continue prompts."""
    taught: bool = False
    """True if a teacher goes over each micro-batch first."""


def of_engine(engine: str) -> tuple[Gap, ...]:
    """Return what the runtime does not run of a spec for an engine: all of it, unless the engine is partool."""
    return () if engine == "partool" else (Gap("PT826", f"plans for {ENGINES[engine].title}", ("engine",)),)


def task(problem: Problem) -> Task:
    """Return the requirements on the runtime that all layouts of a problem share."""
    spec = problem.spec
    hf = problem.described is not None
    precision, optimizer = spec.training.precision, spec.optimizer.name
    prefers, averages = spec.training.objective.prefers, spec.training.ema is not None
    continues, frozen = bool(spec.training.validation.prompts), bool(problem.frozen)
    taught = problem.teacher is not None
    return Task(problem.model, problem.devices, precision, frozen, hf, optimizer, prefers, averages, continues, taught)


def task_of(plan: Plan, devices: Devices) -> Task:
    """Return the requirements on the runtime that a plan on ``devices`` has, except those of the plan's layout."""
    return Task(
        plan.model,
        devices,
        plan.training.precision,
        bool(plan.frozen),
        not plan.own_decoder,
        plan.optimizer.name,
        plan.training.objective.prefers,
        plan.training.ema is not None,
        bool(plan.training.validation.prompts),
        plan.teacher is not None,
    )


def of_task(asked: Task) -> Iterator[str]:
    """Yield the aspects (such as ``precision bf16``) that all layouts of a task need from the runtime."""
    yield f"backend {asked.devices.backend}"
    yield "one node" if asked.devices.nodes == 1 else "several nodes"
    yield f"precision {asked.precision}"
    if asked.frozen:
        yield "frozen parameters"
    if asked.prefers:
        yield "preferences"
    if asked.continues:
        yield "continued prompts"
    if asked.taught:
        yield "teacher"
    if asked.averages:
        yield "moving average"
        if OPTIMIZERS[asked.optimizer].whole_steps:
            yield "moving average with exchanges of one bit"
    yield from ["model of transformers"] if asked.hf else of_model(asked.model)
    if asked.model.adapter is not None:
        yield from _of_adapter(asked)
    if asked.model.predictions:
        yield from _of_predictions(asked)
    record = ARCHITECTURES.get(asked.devices.architecture)
    if asked.precision == "fp8" and asked.devices.architecture and (record is None or record.fp8 is None):
        yield "fp8 on other architectures"


def _of_predictions(asked: Task) -> Iterator[str]:
    """Yield the aspects of multi-token prediction that all layouts of a task need."""
    if asked.model.adapter is not None:
        yield "predictions beside an adapter"
    if asked.prefers:
        yield "predictions of pairs of answers"
    if asked.precision == "fp8":
        yield "predictions in fp8"
    if OPTIMIZERS[asked.optimizer].whole_steps:
        yield "predictions with exchanges of one bit"


def _of_adapter(asked: Task) -> Iterator[str]:
    """Yield the aspects of a model with an adapter that all layouts of a task need."""
    yield "adapter of a model of transformers" if asked.hf else "adapter"
    if asked.precision == "fp8":
        yield "adapter in fp8"
    record = OPTIMIZERS[asked.optimizer]
    if record.rest:
        yield "adapter with an optimizer of whole matrices"
    if record.whole_steps:
        yield "adapter with exchanges of one bit"


def _with_value(name: str, index: int, ranks: str = "") -> Callable[[Layouts], Mask]:
    """Return a function that says which rows have ``index`` in the column ``name``, and several ``ranks``."""
    if not ranks:
        return lambda rows: getattr(rows, name) == index
    return lambda rows: (getattr(rows, ranks) > 1) & (getattr(rows, name) == index)


def _beside(rows: Layouts) -> Mask:
    """Return a mask of rows with more than sequence parallelism."""
    return (rows.tp > 1) | (rows.pp > 1) | (rows.compiled == 1) | (rows.mlp_tile_tokens > 0)


def _of_method(at: int, name: str) -> Iterator[tuple[str, Callable[[Layouts], Mask]]]:
    chosen = _with_value("sequence_method", at, "cp")
    yield f"sequence {name}", chosen
    if name in BY_GRAPH:
        yield GRAPH_ALONE, lambda rows: chosen(rows) & _beside(rows)


_OF_COLUMNS: tuple[tuple[str, Callable[[Layouts], Mask]], ...] = (
    *((f"zero {stage}", _with_value("zero", stage)) for stage in range(4)),
    *((f"recompute {name}", _with_value("recompute", at)) for at, name in enumerate(RECOMPUTE)),
    *((f"schedule {name}", _with_value("schedule", at, "pp")) for at, name in enumerate(SCHEDULES)),
    *(aspect for at, name in enumerate(SEQUENCE_METHODS) for aspect in _of_method(at, name)),
    ("compile block", lambda rows: rows.compiled == 1),
    ("compile none", lambda rows: rows.compiled == 0),
    ("accumulation", lambda rows: rows.accumulation > 1),
    ("hybrid sharding", lambda rows: (rows.zero > 0) & (rows.replicas > 1)),
    ("tensor", lambda rows: rows.tp > 1),
    ("tensor in two dimensions", lambda rows: rows.tensor_inner > 1),
    ("norms on shares of the sequence", lambda rows: (rows.tp > 1) & (rows.sequence_norms == 1)),
    ("tensor with fused collectives", _with_value("tensor_overlap", OVERLAPS.index("symmetric"), "tp")),
    ("tensor in a pipeline", lambda rows: (rows.tp > 1) & (rows.pp > 1)),
    ("zero 0 on sequence ranks", lambda rows: (rows.zero == 0) & (rows.cp > 1)),
    ("zero 0 beside tensor ranks", lambda rows: (rows.zero == 0) & (rows.tp > 1) & (rows.replicas * rows.shards > 1)),
    ("zero 2 or 3 in a pipeline", lambda rows: (rows.zero > 1) & (rows.pp > 1)),
    ("zero 3 on tensor ranks", lambda rows: (rows.zero == 3) & (rows.tp > 1)),
    ("tensor ranks that share sequences", lambda rows: (rows.cp > 1) & (rows.tp > 1)),
    ("expert", lambda rows: rows.ep > 1),
    ("parts of experts", lambda rows: rows.etp > 1),
    ("node-first exchange of experts", lambda rows: among(rows.expert_exchange, BY_NODE)),
    ("padded exchange of experts", lambda rows: rows.expert_exchange == PADDED),
    ("tiles of networks", lambda rows: rows.mlp_tile_tokens > 0),
    ("tiles of the loss", lambda rows: rows.loss_tile_tokens > 0),
    ("offload", lambda rows: rows.gpu_fraction < 1),
    ("offload of the optimizer alone", lambda rows: (rows.gpu_fraction < 1) & (rows.offload_parameters == 0)),
    ("offload of parameters", lambda rows: rows.offload_parameters == 1),
    ("offload of activations", lambda rows: rows.offload_activations == 1),
)
"""Aspects that follow from columns of layouts, each with the rows that need it."""


_MOVING = [SCHEDULES.index(name) for name in MOVING_WEIGHTS]
_OF_ADAPTERS: tuple[tuple[str, Callable[[Layouts], Mask]], ...] = (
    ("adapter with weights that travel", lambda rows: (rows.pp > 1) & np.isin(rows.schedule, _MOVING)),
    ("adapter on tensor ranks in two dimensions", lambda rows: rows.tensor_inner > 1),
    ("adapter on parts of experts", lambda rows: rows.etp > 1),
)
"""Aspects that follow from columns of layouts of a model with an adapter."""
_GRIDS = [SEQUENCE_METHODS.index(name) for name in ON_GRIDS]
_GRAPHS = [SEQUENCE_METHODS.index(name) for name in BY_GRAPH]
_OF_OTHER_ADAPTERS: tuple[tuple[str, Callable[[Layouts], Mask]], ...] = (
    ("adapter in a captured graph", lambda rows: (rows.cp > 1) & np.isin(rows.sequence_method, _GRAPHS)),
)
"""Aspects of adapters of a model of transformers."""
_OF_DROPOUT: tuple[tuple[str, Callable[[Layouts], Mask]], ...] = (
    ("dropout of an adapter along a grid", lambda rows: (rows.cp > 1) & np.isin(rows.sequence_method, _GRIDS)),
)
"""Aspects that follow from columns of layouts of a model whose adapter has dropout."""
_OF_OTHER_DROPOUT: tuple[tuple[str, Callable[[Layouts], Mask]], ...] = (
    ("dropout of an adapter of transformers in tiles", lambda rows: rows.mlp_tile_tokens > 0),
    ("dropout of an adapter of transformers on tensor ranks", lambda rows: rows.tp > 1),
)
"""The same of a model of transformers."""


_OF_PREDICTIONS: tuple[tuple[str, Callable[[Layouts], Mask]], ...] = (
    ("predictions in a pipeline", lambda rows: rows.pp > 1),
    ("predictions on tensor ranks in two dimensions", lambda rows: rows.tensor_inner > 1),
    ("predictions along a grid", lambda rows: (rows.cp > 1) & np.isin(rows.sequence_method, _GRIDS)),
    (
        "predictions beside offloading",
        lambda rows: (rows.gpu_fraction < 1) | (rows.offload_parameters == 1) | (rows.offload_activations == 1),
    ),
)
"""Aspects that follow from columns of layouts of a model that predicts further tokens."""


_OF_AVERAGES = "moving average beside offloaded state"


def of_average_columns(rows: Layouts) -> Mask:
    """Return a mask of rows whose layout the runtime does not run with a moving average (:data:`_OF_AVERAGES`)."""
    return (rows.gpu_fraction < 1) | (rows.offload_parameters == 1)


def of_model_columns(model: ModelConfig, rows: Layouts, *, hf: bool) -> Iterator[tuple[str, Mask]]:
    """Yield each aspect of a model's adapter and of its predictions of further tokens that columns of ``rows`` need.

    Each comes with a mask of the rows that need it.

    ``hf`` is a model that transformers builds.
    """
    if model.adapter is not None:
        aspects = (*_OF_ADAPTERS, *(_OF_OTHER_ADAPTERS if hf else ()))
        if model.adapter.dropout:
            aspects += _OF_OTHER_DROPOUT if hf else _OF_DROPOUT
        yield from ((aspect, needing(rows)) for aspect, needing in aspects)
    if model.predictions:
        yield from ((aspect, needing(rows)) for aspect, needing in _OF_PREDICTIONS)


def of_columns(rows: Layouts, wanted: Callable[[str], bool] = lambda aspect: True) -> Iterator[tuple[str, Mask]]:
    """Yield each aspect that follows from columns of ``rows``, with a mask of the rows that need the aspect.

    Only ``wanted`` aspects are looked for: most are supported, and a mask of a million rows takes its time.
    """
    yield from ((aspect, needing(rows)) for aspect, needing in _OF_COLUMNS if wanted(aspect))


def aspects(asked: Task, layout: Layout) -> Iterator[str]:
    """Yield all aspects that a layout needs."""
    yield from of_task(asked)
    yield from (aspect for aspect, applies in of_columns(encode(layout)) if applies)
    yield from (aspect for aspect, applies in of_model_columns(asked.model, encode(layout), hf=asked.hf) if applies)
    if asked.averages and of_average_columns(encode(layout)):
        yield _OF_AVERAGES
    yield from (f"recompute {policy}" for policy in sorted(set(layout.recompute)))
    yield from of_lists(layout)
    if asked.hf and layout.sequence.degree > 1:
        yield "shared sequences of a model of transformers"
    by_graph = layout.sequence.degree > 1 and layout.sequence.method in BY_GRAPH
    if by_graph and (asked.precision == "fp8" or layout.data.leaves):
        yield GRAPH_ALONE
    if asked.precision == "fp8":
        yield from _of_fp8(asked, layout)
    if asked.prefers:
        yield from _of_positions(layout, "preferences")
    if asked.continues:
        yield from _of_positions(layout, "continued prompts")
    if asked.taught and layout.tensor.inner > 1:
        yield "teacher on tensor ranks in two dimensions"
    if asked.model.moe is not None and not asked.hf:
        yield from _of_experts(asked, layout)


def of_lists(layout: Layout) -> Iterator[str]:
    """Yield the aspects of a layout that its row in a search does not say."""
    data, offload = layout.data, layout.offload
    others = (data.gather != "coalesced", data.prefetch != 1, data.persistent > 0, bool(data.leaves))
    yield from (name for name, applies in zip(GATHERS, others, strict=True) if applies)
    if offload.optimizer == "nvme":
        yield "offload to disks"
    if offload.parameters == "nvme":
        yield "offload of parameters to disks"


def _of_experts(asked: Task, layout: Layout) -> Iterator[str]:
    """Yield aspects that combine layers of experts with other features of a layout."""
    if layout.pipeline.stages > 1 and layout.pipeline.schedule in MOVING_WEIGHTS:
        yield "experts with weights that travel"
    if layout.sequence.degree > 1 and layout.sequence.method in ON_GRIDS:
        yield "experts along a grid"
    if asked.precision == "fp8":
        yield "experts in fp8"


def _of_positions(layout: Layout, what: str) -> Iterator[str]:
    """Yield aspects that combine what looks at single positions with other features of a layout."""
    if layout.tensor.inner > 1:
        yield f"{what} on tensor ranks in two dimensions"
    if layout.pipeline.stages > 1 and layout.pipeline.schedule in MOVING_WEIGHTS:
        yield f"{what} with weights that travel"


def _of_fp8(asked: Task, layout: Layout) -> Iterator[str]:
    """Yield aspects that combine fp8 products with other features of a layout."""
    if layout.tensor.inner > 1:
        yield "fp8 on tensor ranks in two dimensions"
    if asked.hf and layout.tensor.degree > 1:
        yield "fp8 on tensor ranks of a model of transformers"
    if layout.pipeline.stages > 1 and layout.pipeline.schedule in MOVING_WEIGHTS:
        yield "fp8 with weights that travel"


def gaps(asked: Task, layout: Layout) -> tuple[Gap, ...]:
    """Return the aspects that a layout needs but the runtime lacks; empty if the runtime can run the layout."""
    missing = dict.fromkeys(aspect for aspect in aspects(asked, layout) if not runs(aspect))
    return tuple(sorted((GAPS[aspect] for aspect in missing), key=lambda gap: gap.code))


def runnable(problem: Problem, layout: Layout) -> bool:
    """Return True if the runtime can run a layout."""
    return not gaps(task(problem), layout)


def nothing_runs(problem: Problem) -> bool:
    """Return True if the runtime can run no layout of a problem because of the problem's model or machines."""
    return not all(runs(aspect) for aspect in of_task(task(problem)))


def able(
    rows: Layouts, model: ModelConfig | None = None, *, hf: bool = False, averages: bool = False
) -> NDArray[np.bool_]:
    """Return a mask of rows for which the runtime supports all aspects, also those of the model's adapter.

    ``hf`` is a model that transformers builds; ``averages`` says that a moving average of the weights is kept.
    """
    mask = _without(rows, lambda aspect: not runs(aspect))
    if averages:
        mask &= np.logical_not(of_average_columns(rows))
    for _, asked in () if model is None else of_model_columns(model, rows, hf=hf):
        mask &= np.logical_not(asked)
    return mask


def within(engine: EngineRecord, rows: Layouts) -> NDArray[np.bool_]:
    """Return a mask of rows that an engine can do."""
    return _without(rows, engine.lacks.__contains__)


def beyond(engine: EngineRecord, layout: Layout) -> Iterator[str]:
    """Yield the aspects of a layout that an engine lacks."""
    needed = [aspect for aspect, applies in of_columns(encode(layout)) if applies]
    needed += [f"recompute {policy}" for policy in sorted(set(layout.recompute))]
    yield from (aspect for aspect in dict.fromkeys([*needed, *of_lists(layout)]) if aspect in engine.lacks)


def _without(rows: Layouts, lacking: Callable[[str], bool]) -> NDArray[np.bool_]:
    mask = np.ones(rows.shape, dtype=bool)
    for _, asked in of_columns(rows, lacking):
        mask &= np.logical_not(asked)
    return mask

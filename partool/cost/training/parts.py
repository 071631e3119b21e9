"""State and work of pipeline ranks under many layouts; what repeats among the layouts of one job is computed once.

The training state does not depend on micro-batches and recomputation, the work of passes not on how state is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import Column, Layouts, Mask
from partool.cost.memory import in_flight as closed
from partool.cost.memory.rank_parameters import RankLoad, load_of_rank
from partool.cost.memory.stacks import memory_stack
from partool.cost.repeats import Memo, codes
from partool.cost.training.pass_bytes import PassBytes, bytes_of_layers, pass_bytes
from partool.cost.training.states import States, states
from partool.work.training import TrainingWork

Place = Literal["first", "second", "last"]
"""A pipeline rank, by its place."""
Parts = tuple[States, PassBytes]
_STATES = tuple(one.name for one in fields(States) if one.name != "host")
_WORK = tuple(one.name for one in fields(PassBytes) if one.name != "begun")
_OF_STATES = (
    "pp", "replicas", "shards", "cp", "tp", "ep", "etp", "zero", "chunks", "gpu_fraction", "offload_parameters",
    "tensor_inner", "sequence_norms",
)  # fmt: skip
"""Columns that affect the training state, besides those of :func:`_state_case`."""
_OF_WORK = (
    "pp", "cp", "tp", "ep", "etp", "micro_batch", "chunks", "in_flight", "recompute", "recompute_share",
    "sequence_method", "sequence_order", "sequence_inner", "sequence_teams", "sequence_inside", "mlp_tile_tokens",
    "loss_tile_tokens", "offload_activations", "compiled", "tensor_inner", "sequence_norms",
)  # fmt: skip
"""Columns that affect the work of passes, besides those of :func:`_work_case`."""


class _PricedParts:
    """State and work of the cases that one job has priced so far."""

    def __init__(self) -> None:
        self.states, self.work = Memo(), Memo()
        self.least, self.least_work = Memo(), Memo()
        """The few columns that tell most layouts that are too large."""
        self.host: tuple[str, ...] = ()
        """Keys of ``States.host``."""


def parts(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> Parts:
    """Return the state and the work of the pipeline ranks at ``places`` if layers are split as evenly as possible.

    ``layouts`` has columns; those of the result are arrays [places, layouts], so that equations run once for all ranks.
    """
    state, work = (_by_place(of(job, layouts, places), places) for of in (_state_columns, _work_columns))
    rows = iter(state)
    return _next_states(rows, _memo_of(job, places).host), PassBytes(*work)


def _by_place(columns: NDArray[np.float64], places: Sequence[Place]) -> NDArray[np.float64]:
    """Return columns that come place by place as an array [columns, places, layouts]."""
    return columns.reshape(len(places), len(columns) // len(places), columns.shape[1]).swapaxes(0, 1)


def _states_at(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> list[States]:
    """Return the state of the pipeline ranks at ``places``, one by one; ``layouts`` has columns."""
    state = iter(_state_columns(job, layouts, places))
    return [_next_states(state, _memo_of(job, places).host) for _ in places]


def _state_columns(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> NDArray[np.float64]:
    memo = _memo_of(job, places)

    def of_states(first: Any) -> list[Column]:
        ranks = _states(job, layouts.take(first), places)
        memo.host = tuple(ranks[0].host)
        return [column for one in ranks for column in (*(getattr(one, name) for name in _STATES), *one.host.values())]

    return memo.states.results(codes(layouts.shape[0], _state_case(layouts)), of_states)


def least_state(job: TrainingWork, layouts: Layouts, places: Sequence[Place], *, keep: bool = True) -> Column:
    """Return the bytes of training state on the device in the optimizer's step, of the rank that has most.

    ``keep`` is as in :func:`least_passes`.
    """
    return np.asarray(_bytes_of_state(job, layouts, places, slice(0, 1), keep=keep)[0])


def least_passes(
    job: TrainingWork, layouts: Layouts, places: Sequence[Place], *, keep: bool = True
) -> tuple[Column, Column]:
    """Return bytes on the device and on the host that the fullest rank has at least.

    On the device these are those of the optimizer's step, of the loss, or of the backward pass of one layer: with the
    saved activations of all micro-batches in flight, or with the gradients of earlier micro-batches. Gathered
    parameters count where they outlast a layer. With ``keep``, state and work of new cases are kept for later calls of
    :func:`parts`; of many layouts, few of which will be priced again, only what is read here should be kept.
    """
    device, host = [], []
    several, lasting = layouts.accumulation > 1, np.asarray(layouts.zero) != 3
    state = iter(_bytes_of_state(job, layouts, places, slice(1, None), keep=keep))
    pass_columns = iter(_bytes_of_work(job, layouts, places, keep=keep))
    for _ in places:
        resident, at_step, earlier, gathered, on_host = (next(state) for _ in range(5))
        first, later, moved = (next(pass_columns) for _ in range(3))
        passes = np.maximum(first, np.where(several, earlier, 0.0) + later) + np.where(lasting, gathered, 0.0)
        device.append(resident + np.maximum(at_step, passes))
        host.append(on_host + moved)
    return tuple(np.maximum.reduce(np.broadcast_arrays(*each)) for each in (device, host))


def _bytes_of_state(job: TrainingWork, layouts: Layouts, places: Sequence[Place], which: slice, *, keep: bool) -> Any:
    """Return some of the columns of the state's bytes.

    They are the most of any rank in the optimizer's step, then those that :func:`least_passes` reads of each rank.
    """

    def of_rows(first: Any) -> list[Column]:
        rows = layouts.take(first)
        ranks = _states_at(job, rows, places) if keep else _states(job, rows, places)
        resident = [rank.parameters + rank.optimizer for rank in ranks]
        each = [resident_bytes + rank.gradients_at_step for resident_bytes, rank in zip(resident, ranks, strict=True)]
        columns = [np.maximum.reduce(np.broadcast_arrays(*each))]
        for resident_bytes, rank in zip(resident, ranks, strict=True):
            # On a CPU, gradients in transfer to the host are nowhere else.
            earlier = rank.gradients_before - rank.grads_offloading
            columns += [resident_bytes, rank.gradients_at_step, earlier, rank.gathered, sum(rank.host.values())]
        return columns

    return _memo_of(job, places).least.results(codes(layouts.shape[0], _state_case(layouts)), of_rows, which)


def _bytes_of_work(job: TrainingWork, layouts: Layouts, places: Sequence[Place], *, keep: bool) -> Any:
    """Return three columns of each rank.

    They are the bytes of passes with all saved activations, those with earlier gradients instead, and the bytes of
    activations on the host.
    """

    def of_rows(first: Any) -> list[Column]:
        rows, columns = layouts.take(first), []
        for rank in _work_at(job, rows, places) if keep else _work(job, rows, places):
            loss = np.minimum(rank.loss, rank.loss_backward)
            # Where dense layers come first, all saved activations exist together with a layer with experts at work;
            # with WeiPipe, ``backward_peak_bytes`` may be smaller, as some tensors count as saved.
            last = np.where(
                rank.moe_peak_bytes > 0,
                np.minimum(rank.moe_peak_bytes, rank.backward_peak_bytes),
                rank.backward_peak_bytes,
            )
            working = last - rank.of_norm
            peak_bytes = np.maximum(rank.saved - rank.inputs + np.maximum(loss, working), 0.0)
            columns += [peak_bytes, np.maximum(working - rank.inputs, 0.0), rank.on_host]
        return columns

    return _memo_of(job, places).least_work.results(codes(layouts.shape[0], _work_case(layouts)), of_rows)


def _work_at(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> list[PassBytes]:
    """Return the work of the pipeline ranks at ``places``, one by one; ``layouts`` has columns."""
    columns = iter(_work_columns(job, layouts, places))
    return [PassBytes(*(next(columns) for _ in _WORK)) for _ in places]


def _work_columns(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> NDArray[np.float64]:
    def of_work(first: Any) -> list[Column]:
        ranks = _work(job, layouts.take(first), places)
        return [getattr(one, name) for one in ranks for name in _WORK]

    return _memo_of(job, places).work.results(codes(layouts.shape[0], _work_case(layouts)), of_work)


def _memo_of(job: TrainingWork, places: Sequence[Place]) -> _PricedParts:
    memo: _PricedParts = job.memo.setdefault(f"memory of {', '.join(places)}", _PricedParts())
    return memo


def _state_case(layouts: Layouts) -> list[Column | Mask]:
    """Return the columns on which the training state of the ranks at all places depends."""
    several = layouts.accumulation > 1
    return [several, layouts.ring, layouts.folded, *(getattr(layouts, name) for name in _OF_STATES)]


def _work_case(layouts: Layouts) -> list[Column | Mask]:
    """Return the columns on which the work of the ranks at all places depends.

    Without a pipeline the schedule and the number of micro-batches have no effect.
    """
    several = np.asarray(layouts.pp) > 1
    pipeline = (np.where(several, column, 0) for column in (layouts.schedule, layouts.accumulation))
    return [*pipeline, *(getattr(layouts, name) for name in _OF_WORK)]


def _next_states(rows: Iterator[Column], host: tuple[str, ...]) -> States:
    plain = {name: next(rows) for name in _STATES}
    return States(**plain, host={name: next(rows) for name in host})


def _load(job: TrainingWork, layouts: Layouts, place: Place) -> RankLoad:
    last = layouts.pp - 1
    rank: Column = 0 * last if place == "first" else last if place == "last" else np.minimum(1, last)
    return load_of_rank(job, layouts, rank, closed.in_flight(layouts, rank))


def _states(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> list[States]:
    stack = memory_stack(job.stack.name)
    return [states(job, layouts, stack, _load(job, layouts, place)) for place in places]


def _work(job: TrainingWork, layouts: Layouts, places: Sequence[Place]) -> list[PassBytes]:
    stack, loads = memory_stack(job.stack.name), [_load(job, layouts, place) for place in places]
    layers = bytes_of_layers(job, layouts, stack, loads)
    return [pass_bytes(job, layouts, stack, each, layers) for each in loads]

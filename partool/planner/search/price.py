"""Prices of layouts: closed equations on columns for many layouts, exact predictions for single layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import RECOMPUTE, Column, Layouts, Mask
from partool.cost.codec import encode
from partool.cost.memory.fit import fit_probability
from partool.cost.training import host_state, micro
from partool.cost.training.bound import Open, bound_s, pass_bound_s
from partool.cost.training.peak import Memory, least_memory, least_memory_of_passes, peak_memory, predict_memory
from partool.cost.training.predict import predict_time, time_terms
from partool.plan.layout import Layout
from partool.plan.types import MemoryPrediction, TimePrediction
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.planner.search.score import UNFIT_BELOW, complexity_of, fill_share, risk_of
from partool.spec.hardware import Devices
from partool.spec.numbers import GIB
from partool.spec.parallel import Compile
from partool.work.training import TrainingWork

SLACK = 0.03
"""Relative error by which the closed equations may exceed the exact memory; layouts that exceed the memory limit
by a smaller share are kept."""
TIE = 1e-3
"""Share of the step time below which texts do not call one layout faster than another."""
HOST_SHARE = 0.9
"""Share of a node's memory that training may use; the rest is for the system, file cache and data loader."""
PINNED_SHARE = 0.5
"""Share of an assumed host's memory that the ranks of a node pin at most."""
_PINNED_SLACK = 1.05
"""Factor by which the closed equations of pinned memory may exceed the exact equations."""


@dataclass(frozen=True)
class Priced:
    """One layout with its exact price; each part is computed on first use."""

    problem: Problem
    layout: Layout

    @property
    def job(self) -> TrainingWork:
        """The input of the cost functions for this layout."""
        return cost_job(self.problem, self.layout.compile)

    @cached_property
    def time(self) -> TimePrediction:
        """Predicted time and traffic of a step."""
        return predict_time(self.job, self.layout, self.problem.spec.training.steps, self.terms_s)

    @cached_property
    def terms_s(self) -> dict[str, float]:
        """Predicted seconds of a step by term."""
        return time_terms(self.job, self.layout)

    @cached_property
    def step_time_s(self) -> float:
        """Predicted seconds of a step; cheaper than ``time``, which also counts traffic."""
        return sum(self.terms_s.values())

    @cached_property
    def memory(self) -> MemoryPrediction:
        """Predicted peak memory of each pipeline rank."""
        return predict_memory(self.job, self.layout, self.problem.spec.limits.memory_headroom)

    @cached_property
    def host_bytes(self) -> int:
        """Bytes of host memory that a node needs."""
        return self.memory.host_bytes if self.layout.offload.active else 0

    @property
    def fits(self) -> bool:
        """True if the predicted memory is within the limits of device and host."""
        small = self.memory.total_bytes <= self.memory.capacity_bytes
        small &= self.host_bytes <= host_limit(self.problem)
        pinned = sum(self.pinned_parts.values()) if self.layout.offload.active else 0
        return small and pinned <= pinned_limit(self.problem)

    @cached_property
    def risk(self) -> float:
        """Sum of the errors of the mechanisms that the layout uses and the spec does not ask for."""
        return float(risk_of(self.problem, encode(self.layout)))

    @property
    def unfit(self) -> float:
        """Probability that the layout does not fit into the device's memory."""
        return 1.0 - self.memory.fit_probability

    @cached_property
    def factor(self) -> float:
        """The score as a multiple of the step time (:mod:`partool.planner.search.score`)."""
        return self._plain + self.risk

    @cached_property
    def _plain(self) -> float:
        """The same without the errors of mechanisms."""
        problem = self.problem
        small = float(complexity_of(problem, encode(self.layout)))
        fill = float(fill_share(self.memory.total_bytes, self.unfit, problem.devices.memory_bytes))
        return 1.0 + small + fill

    @property
    def score_s(self) -> float:
        """Seconds by which layouts are ordered; the layout with the least score is taken."""
        return self.step_time_s * self.factor

    @property
    def paper_s(self) -> float:
        """The score in seconds if predictions of mechanisms did not err."""
        return self.step_time_s * self._plain

    @property
    def pinned_parts(self) -> dict[str, int]:
        """Bytes of each term of host memory that a rank has to pin; optional spare gradient buffers are left out."""
        terms = self.memory.host_terms_bytes
        parts = {name: size for name, size in terms.items() if name in host_state.pinned_terms(self.job)}
        if "gradients" in parts and self.layout.offload.optimizer != "none":
            parts["gradients"] = max(0, parts["gradients"] - host_state.SPARE * self.layout.offload.bucket_bytes)
        return parts

    @property
    def safe(self) -> bool:
        """True if the layout is sure to fit."""
        return self.fits and self.memory.verdict == "green"


@dataclass(frozen=True)
class MemoryNeed:
    """Predicted memory of many layouts."""

    total_bytes: Column
    probability: Column
    host_bytes: Column
    unfit: Column
    """Lower bound of the probability that the exact layout does not fit; 0 for pipelines, whose stages differ."""


def room_below(
    problem: Problem, layouts: Layouts, most_bytes: Column, most_host_bytes: float = float("inf")
) -> MemoryNeed:
    """Return the predicted memory of the layouts that may need at most ``most_bytes``, and less of others.

    Layouts whose training state needs more get the bytes of the state, and layouts that need more by
    :func:`least_memory_of_passes` get those bytes; neither fit. Layouts that need more than ``most_host_bytes`` of a
    node's memory get infinite host bytes.
    """
    least, rows = _bounded(problem, layouts, most_bytes, most_host_bytes)
    need = MemoryNeed(least, np.zeros(layouts.shape), np.full(layouts.shape, np.inf), np.zeros(layouts.shape))
    if len(rows):
        one = room(problem, layouts.take(rows))
        for name in ("total_bytes", "probability", "host_bytes", "unfit"):
            getattr(need, name)[rows] = getattr(one, name)
    return need


def least_room(problem: Problem, layouts: Layouts, most_bytes: Column) -> NDArray[np.float64]:
    """Return bytes of device memory that each layout exceeds, whether they are more than ``most_bytes`` or not."""
    return _bounded(problem, layouts, most_bytes, float("inf"), keep=False)[0]


def _by_compile(layouts: Layouts) -> Iterator[tuple[Compile, NDArray[np.intp]]]:
    """Yield each setting of ``compile`` that layouts have, with the indices of these layouts."""
    compiled = np.broadcast_to(np.asarray(layouts.compiled) == 1, layouts.shape)
    for choice, mask in (("block", compiled), ("none", ~compiled)):
        if mask.any():
            yield choice, np.flatnonzero(mask)  # type: ignore[misc]


def _bounded(
    problem: Problem, layouts: Layouts, most_bytes: Column, most_host_bytes: float, *, keep: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return bytes that each layout exceeds, and the indices of layouts that these and the host's bytes leave.

    With ``keep``, the exact memory of these layouts takes less time afterwards.
    """
    every, remaining = np.zeros(layouts.shape), [np.zeros(0, dtype=np.intp)]
    most = np.broadcast_to(most_bytes, layouts.shape)
    for choice, at in _by_compile(layouts):
        job = cost_job(problem, choice)
        every[at], rows = _bounded_of(problem, job, layouts.take(at), most[at], most_host_bytes, keep=keep)
        remaining.append(at[rows])
    return every, np.sort(np.concatenate(remaining))


def _bounded_of(
    problem: Problem, job: TrainingWork, layouts: Layouts, most_bytes: Column, most_host_bytes: float, *, keep: bool
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the same of layouts that have the same setting of ``compile``."""
    shape = layouts.shape
    least = np.array(np.broadcast_to(least_memory(job, layouts, keep=keep), shape))
    rows = np.flatnonzero(least <= most_bytes)
    # Of a list of policies by layer, each takes less or more than the one that the columns name.
    if len(rows) and not isinstance(problem.spec.parallel.recompute, list):
        device, host = least_memory_of_passes(job, layouts.take(rows), keep=keep)
        least[rows] = device
        rows = rows[(device <= np.broadcast_to(most_bytes, shape)[rows]) & (host <= most_host_bytes)]
    return least, rows


def room(problem: Problem, layouts: Layouts) -> MemoryNeed:
    """Return the predicted memory of many layouts.

    If the spec lists a policy per layer, each listed policy is priced on all layers, and the least memory is returned.
    The policy with the least memory is not always the policy that keeps fewest activations, as kept activations may be
    offloaded.
    """
    pinned = problem.spec.parallel.recompute
    if not isinstance(pinned, list):
        return _room(problem, layouts)
    each = [
        _room(problem, layouts.with_columns(recompute=0 * layouts.recompute + RECOMPUTE.index(policy)))
        for policy in dict.fromkeys(pinned)
    ]
    return MemoryNeed(
        np.minimum.reduce([np.asarray(one.total_bytes) for one in each]),
        np.maximum.reduce([np.asarray(one.probability) for one in each]),
        np.minimum.reduce([np.asarray(one.host_bytes) for one in each]),
        np.minimum.reduce([np.asarray(one.unfit) for one in each]),
    )


def _room(problem: Problem, layouts: Layouts) -> MemoryNeed:
    parts = [(at, _room_of(problem, choice, layouts.take(at))) for choice, at in _by_compile(layouts)]
    if len(parts) == 1:
        return parts[0][1]
    need = MemoryNeed(*(np.zeros(layouts.shape) for _ in range(4)))
    for at, part in parts:
        for name in ("total_bytes", "probability", "host_bytes", "unfit"):
            getattr(need, name)[at] = getattr(part, name)
    return need


def _room_of(problem: Problem, choice: Compile, layouts: Layouts) -> MemoryNeed:
    memory = peak_memory(cost_job(problem, choice), layouts)
    total, device_bytes = memory.total_bytes, problem.devices.memory_bytes
    probability = fit_probability(total, memory.sigma_bytes, device_bytes)
    smaller = fit_probability(total / (1.0 + SLACK), memory.sigma_bytes / (1.0 + SLACK), device_bytes)
    host_bytes = np.where(_pins_too_much(problem, layouts, memory), np.inf, memory.host_bytes)
    return MemoryNeed(
        total,
        probability,
        host_bytes,
        np.where(np.asarray(layouts.pp) > 1, 0.0, np.maximum(1.0 - smaller - UNFIT_BELOW, 0.0)),
    )


def _pins_too_much(problem: Problem, layouts: Layouts, memory: Memory) -> Mask:
    """Return a mask of layouts whose pinned memory exceeds the spec's limit by more than the equations' error."""
    limit = pinned_limit(problem)
    if limit == float("inf"):
        return False
    job = cost_job(problem)
    elements = problem.trained / (layouts.pp * layouts.tp * np.where(layouts.zero > 0, layouts.shards * layouts.cp, 1))
    bucket = host_state.bucket_elements(job, layouts, elements * (1.0 - layouts.gpu_fraction))
    spare = host_state.SPARE * host_state.wire_bytes(job, layouts) * bucket
    parts = {name: size for name, size in memory.host_terms.items() if name in host_state.pinned_terms(job)}
    least = sum(np.maximum(0.0, size - spare) if name == "gradients" else size for name, size in parts.items())
    return least > limit * _PINNED_SLACK


def pinned_limit(problem: Problem) -> float:
    """Return the bytes that a rank may pin; infinite if nothing limits them, or if the limit is relaxed.

    If neither this limit nor the host's memory is in the spec, the ranks of a node pin at most half of the memory that
    such hosts usually have.
    """
    asked, devices = problem.spec.parallel.offload.pinned_gib, problem.devices
    if "pinned" in problem.relaxed:
        return float("inf")
    if asked != "auto":
        return float(int(asked * GIB))
    stated = problem.spec.hardware.host_memory_gib is not None or devices.backend == "cpu"
    if stated or devices.host_memory_bytes is None:
        return float("inf")
    return PINNED_SHARE * devices.host_memory_bytes / devices.per_node


def bounds_s(problem: Problem, layouts: Layouts, open_choices: Open | None = None) -> NDArray[np.float64]:
    """Return a lower bound of the step time of each layout; see :func:`partool.cost.training.bound.bound_s`."""
    shape = np.shape(layouts.pp)
    compiled = np.broadcast_to(layouts.compiled == 1, shape)
    if compiled.all() or not compiled.any():
        job = cost_job(problem, "block" if compiled.all() else "none")
        return np.broadcast_to(bound_s(job, layouts, open_choices), shape)
    bound_of_row_s = np.zeros(shape)
    for choice, rows in (("block", compiled), ("none", ~compiled)):
        bound_of_row_s[rows] = bound_s(cost_job(problem, choice), layouts.take(rows), open_choices)  # type: ignore[arg-type]
    return bound_of_row_s


def pass_bounds_s(problem: Problem, layouts: Layouts) -> NDArray[np.float64]:
    """Return a lower bound of the step time of each layout: that of its busiest rank's passes."""
    bound_of_row_s = np.zeros(layouts.shape)
    for choice, rows in _by_compile(layouts):
        bound_of_row_s[rows] = pass_bound_s(cost_job(problem, choice), layouts.take(rows))
    return bound_of_row_s


def prepare(problem: Problem, layouts: Layouts) -> None:
    """Price the micro-batches of many layouts at once, for later calls of :func:`bounds_s` with a part of them."""
    compiled = np.broadcast_to(layouts.compiled == 1, layouts.shape)
    for choice, rows in (("block", compiled), ("none", ~compiled)):
        if rows.any():
            micro.prepare(cost_job(problem, choice), layouts.take(rows))  # type: ignore[arg-type]


def host_limit(problem: Problem) -> float:
    """Return the bytes of a node's memory that training may use; the largest float if the size is not known."""
    return min(host_room(problem.devices), sys.float_info.max)


def host_room(devices: Devices) -> float:
    """Return the bytes of a node's memory that training may use; infinite for a CPU, or if the size is not known."""
    size = devices.host_memory_bytes
    return float("inf") if size is None or devices.backend == "cpu" else HOST_SHARE * size

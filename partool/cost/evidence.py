"""Errors of predictions as published runs show them, by the mechanisms that a layout uses.

``evidence.json`` is written by ``python tests/bench/replay.py RUNS.csv --memory MEMORY.csv --evidence``. Under
``step_time`` and ``memory`` it has, for each kind of code base and mechanism, the numbers of replayed runs and of
sources, and by how much runs exceed their predictions (``above``) or fall short of them (``below``); devices of one
architecture have figures of their own where they are enough. A source has the same weight whatever its number of runs.
``first_runs`` has the median slowdown of sources, ``paired`` the errors of predicted ratios between runs of one sweep
of which one has the mechanism, and ``fit`` how many of the runs that were predicted to fit did fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import SCHEDULES, Column, Layouts, Mask, among
from partool.cost.codec import encode
from partool.plan.layout import Layout
from partool.strategies.schedules import TEXTBOOK

LEAST_SOURCES, LEAST_RUNS = 3, 5
"""Numbers of sources and of runs below which a stated floor replaces the measured error of a ratio."""
FEW_SOURCES = 4
"""Number of sources of a kind below which an error rests on sources of all kinds, or on a stated floor."""
FLOOR, OFFLOAD_FLOOR, PAIRED_FLOOR, MEMORY_FLOOR = 0.25, 0.40, 0.15, 0.15
"""Relative errors with few sources: of the step time, of the step time with offload, of the ratio of two layouts'
step times, and of the peak of memory."""
LEAST_ABOVE, LEAST_BELOW = 0.25, 0.10
"""Relative errors that no step time is predicted within, however close the known runs are: the constants were developed
on these runs, and sources that the constants had not seen were off by more (:data:`FIRST_RUN_SLOWDOWN`)."""
FIRST_RUN_SLOWDOWN = 1.0 / (1.0 - 0.14) - 1.0
"""Share by which a first run takes longer than predicted; an assumption. Predictions are those of tuned runs. A review
held out 19 published sources on which no constant had been developed: 15 were predicted too fast, and the median over
the sources was a prediction 14 % too short. The shared sources cannot show it, as the constants were developed on them
(``first_runs`` in the table)."""
WORDS = {
    "data": "data parallelism with ZeRO-0 to 2", "zero3": "ZeRO-3", "tensor": "tensor parallelism",
    "pipeline": "pipelines", "sequence": "sequence parallelism", "expert": "expert parallelism",
    "other_schedules": "less common pipeline schedules", "tensor_2d": "two-dimensional tensor parallelism",
    "offload_optimizer": "an offloaded optimizer", "offload_parameters": "offloaded parameters",
    "offload_activations": "offloaded activations",
}  # fmt: skip
"""Names of the mechanisms in sentences."""
_TEXTBOOK = tuple(SCHEDULES.index(name) for name in TEXTBOOK)
_OFFLOAD = ("offload_optimizer", "offload_parameters", "offload_activations")


@dataclass(frozen=True)
class Evidence:
    """The error of a prediction, and the runs that it rests on."""

    error: float
    """Share of the predicted value by which five in six such runs exceed it at most."""
    words: str
    """Sources and runs that the error rests on, as text."""
    runs: int = 0
    """Number of these runs."""
    below: float = 0.0
    """Share of the predicted value by which five in six such runs fall short of it at most; 0 of peaks of memory."""


@cache
def shipped() -> Mapping[str, Any]:
    """Return the table that comes with partool."""
    table: dict[str, Any] = json.loads((Path(__file__).parent / "evidence.json").read_text(encoding="utf-8"))
    return table


class DeviceClass(NamedTuple):
    """Kind of device that an error is asked for."""

    accelerator: str = ""
    """Name in the catalog; texts count the runs on it apart."""
    architecture: str = ""
    """Instruction set; runs on devices of the same architecture count alone where they are enough."""


ANY = DeviceClass()
"""Any device: no runs are told apart."""


def step_error(
    layout: Layout, family: str, table: Mapping[str, Any] | None = None, device: DeviceClass = ANY
) -> Evidence:
    """Return the errors of a layout's step time, each that of the mechanism that is known least.

    ``family`` is the kind of code base (:class:`partool.work.stack.Stack`). A mechanism with few sources of the family
    has the errors of all code bases, but no less than the stated floor, and the floor where all sources are few.
    """
    return _widest(_of_step(name, family, _section("step_time", table), device) for name in mechanisms(layout))


def memory_error(
    layout: Layout, family: str, table: Mapping[str, Any] | None = None, device: DeviceClass = ANY
) -> Evidence:
    """Return by which share of the predicted peak runs exceed it: that of the mechanism that is known least.

    Five in six such runs need no more. Arguments are those of :func:`step_error`.
    """
    return _widest(_of_memory(name, family, _section("memory", table), device) for name in mechanisms(layout))


def mechanism_error(name: str, family: str, *, memory: bool = False, device: DeviceClass = ANY) -> Evidence:
    """Return the error of one mechanism's step times, or of its peaks of memory; see :func:`step_error`."""
    if memory:
        return _of_memory(name, family, _section("memory"), device)
    return _of_step(name, family, _section("step_time"), device)


def memory_excess(family: str, architecture: str, layouts: Layouts, *, least: float = 0.0) -> Column:
    """Return the column of :func:`memory_error`'s errors, none of them below ``least``."""
    excess: Column = least
    for name, mask in uses(layouts).items():
        excess = np.where(mask, np.maximum(excess, mechanism_excess(name, family, architecture)), excess)
    return excess


@cache
def mechanism_excess(name: str, family: str, architecture: str) -> float:
    """Return by which share of the predicted peak five in six runs of a mechanism exceed it at most."""
    return _of_memory(name, family, _section("memory"), DeviceClass("", architecture)).error


def _section(metric: str, table: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    section: Mapping[str, Any] = (shipped() if table is None else table).get(metric, {})
    return section


def _widest(errors: Iterable[Evidence]) -> Evidence:
    """Return the widest bar on either side, with the words of the one that reaches farthest above."""
    each = list(errors)
    most = max(each, key=lambda one: (one.error, -one.runs))
    return replace(most, below=max(one.below for one in each))


def _of_step(name: str, family: str, section: Mapping[str, Any], device: DeviceClass) -> Evidence:
    floor = OFFLOAD_FLOOR if name in _OFFLOAD else FLOOR
    evidence = _of_mechanism(name, family, section, device, floor)
    return replace(evidence, error=max(evidence.error, LEAST_ABOVE), below=max(evidence.below, LEAST_BELOW))


def _of_memory(name: str, family: str, section: Mapping[str, Any], device: DeviceClass) -> Evidence:
    return replace(_of_mechanism(name, family, section, device, MEMORY_FLOOR), below=0.0)


def _of_mechanism(name: str, family: str, section: Mapping[str, Any], device: DeviceClass, floor: float) -> Evidence:
    """Return the evidence on one mechanism from the closest kind of runs with enough sources, else the floor."""
    of_family, everyone = section.get(family, {}).get(name), section.get("any", {}).get(name)
    if of_family is not None and of_family["sources"] >= FEW_SOURCES:
        alike = {**of_family, **of_family.get("architectures", {}).get(device.architecture, {})}
        return _measured(alike, f"{WORDS[name]} with such code", device)
    if everyone is not None and everyone["sources"] >= FEW_SOURCES:
        few = _sources(0 if of_family is None else of_family["sources"])
        borrowed = _measured(everyone, f"{WORDS[name]} with any code, as {few} had such code", device)
        return replace(borrowed, error=max(borrowed.error, floor))
    few = _sources(0 if everyone is None else everyone["sources"])
    runs = 0 if everyone is None else everyone["runs"]
    # A run is at most 1 / (1 + floor) of a prediction that is too long by the floor.
    return Evidence(
        floor,
        f"a stated floor, as fewer than {FEW_SOURCES} published sources are known: {few} of {WORDS[name]}",
        runs,
        floor / (1.0 + floor),
    )


def _measured(figures: Mapping[str, Any], what: str, device: DeviceClass) -> Evidence:
    runs, largest = figures["runs"], figures["largest"]
    of_one = f", one source has {largest:.0%} of them" if largest > 0.5 else ""
    here = f"; {figures.get('devices', {}).get(device.accelerator, 0):,} on {device.accelerator}"
    words = f"{_sources(figures['sources'])} of {what} ({runs:,} runs{of_one}{here if device.accelerator else ''})"
    return Evidence(figures["above"], words, runs, figures.get("below", 0.0))


def _sources(count: int) -> str:
    return f"{count or 'no'} source{'s' * (count != 1)}"


@dataclass(frozen=True)
class FirstRun:
    """How much longer than a tuned run the run of a user takes who has tuned nothing."""

    slowdown: float
    """Share of the predicted step time."""
    words: str
    """Origin of the figure, as text."""


def first_run(family: str, table: Mapping[str, Any] | None = None) -> FirstRun:
    """Return by how much first runs exceed a predicted step time.

    It is the stated assumption, :data:`FIRST_RUN_SLOWDOWN`, or the median over the known sources of the kind of code
    base where that is larger.
    """
    by_family = _section("first_runs", table)
    mine, everyone = by_family.get(family), by_family.get("any", {"sources": 0, "slowdown": 0.0})
    words = (
        f"an assumption: of 19 published sources in a review, 15 were predicted too fast, the median by 14 %; the "
        f"{everyone['sources']} sources on which the constants were developed are slower by {everyone['slowdown']:.1%}"
    )
    if mine is None or mine["sources"] < FEW_SOURCES or mine["slowdown"] <= FIRST_RUN_SLOWDOWN:
        return FirstRun(FIRST_RUN_SLOWDOWN, words)
    return FirstRun(mine["slowdown"], f"the median of {_sources(mine['sources'])} with such code")


def enough(figures: Mapping[str, Any]) -> bool:
    """Return True if paired figures rest on enough runs and sources to replace the floor."""
    return bool(figures["sources"] >= LEAST_SOURCES and figures["runs"] >= LEAST_RUNS)


def fit_limit(table: Mapping[str, Any] | None = None) -> tuple[float, int, int]:
    """Return the largest probability of fitting that runs support, and how many of how many green runs fitted.

    After ``n`` runs that all fitted, the next one fits with a probability of (n + 1) / (n + 2) (Laplace's rule).
    """
    fit = (shipped() if table is None else table)["fit"]
    return (fit["fitted"] + 1) / (fit["green"] + 2), fit["fitted"], fit["green"]


def own_runs(accelerator: str) -> int:
    """Return the number of runs of partool's own runtime on an accelerator that were compared with predictions."""
    runs: int = shipped()["own"].get(accelerator, 0)
    return runs


def pair_error(name: str, table: Mapping[str, Any] | None = None) -> float:
    """Return by which share predicted ratios of layouts with and without a mechanism err.

    It is the median error of such pairs of published runs, and not below the floor where few are known.
    """
    figures = (shipped() if table is None else table).get("paired", {}).get(name)
    if figures is None:
        return PAIRED_FLOOR
    return float(figures["median"] if enough(figures) else max(PAIRED_FLOOR, figures["median"]))


def mechanisms(layout: Layout) -> tuple[str, ...]:
    """Return the names of the mechanisms that a layout uses, as in the table of evidence."""
    return tuple(name for name, used in uses(encode(layout)).items() if used)


def uses(layouts: Layouts) -> dict[str, Mask]:
    """Return a mask of the layouts that use each mechanism, by its name in :data:`WORDS`."""
    several = np.asarray(layouts.pp) > 1
    masks = {
        "data": np.asarray(layouts.zero) < 3,
        "zero3": np.asarray(layouts.zero) == 3,
        "tensor": np.asarray(layouts.tp) > 1,
        "pipeline": several,
        "sequence": np.asarray(layouts.cp) > 1,
        "expert": np.asarray(layouts.ep) > 1,
        "other_schedules": several & ~among(layouts.schedule, _TEXTBOOK),
        "tensor_2d": np.asarray(layouts.tensor_inner) > 1,
        "offload_optimizer": np.asarray(layouts.gpu_fraction) < 1.0,
        "offload_parameters": np.asarray(layouts.offload_parameters) > 0,
        "offload_activations": np.asarray(layouts.offload_activations) > 0,
    }
    assert masks.keys() == WORDS.keys()
    return masks

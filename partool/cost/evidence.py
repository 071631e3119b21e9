"""Errors of predictions as published runs show them, by the mechanisms that a layout uses.

``evidence.json`` is written by ``python tests/bench/replay.py RUNS.csv --memory MEMORY.csv --evidence``. For each
mechanism it has the numbers of replayed runs and sources, their median error, and the spread that plans print, by
family of code bases, and within these by architecture of the devices where enough such runs are known; under ``memory``
the same for peaks of memory; under ``paired`` the errors of predicted ratios between runs of one sweep of which one has
the mechanism; and under ``fit`` how many of the runs that were predicted to fit did fit.
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
"""Numbers of sources and of runs below which a stated floor replaces the measured error."""
FLOOR, OFFLOAD_FLOOR, PAIRED_FLOOR, MEMORY_FLOOR = 0.25, 0.40, 0.15, 0.15
"""Relative errors without enough runs: of the step time, of the step time with offload, of the ratio of two layouts'
step times, and of the peak of memory."""
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
    """Relative error that 60 to 80 % of such predictions stay within."""
    words: str
    """Runs that the error rests on, as text."""
    runs: int = 0
    """Number of these runs."""


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
    """Return the error of a layout's step time: that of the mechanism that is known least.

    ``family`` is the kind of code base (:class:`partool.work.stack.Stack`). A mechanism with too few runs of the
    family has the stated floor, or the error over all code bases where that is larger.
    """
    table = shipped() if table is None else table
    errors = (
        _of_mechanism(name, family, table, device, OFFLOAD_FLOOR if name in _OFFLOAD else FLOOR)
        for name in mechanisms(layout)
    )
    return max(errors, key=lambda one: (one.error, -one.runs))


def memory_error(
    layout: Layout, family: str, table: Mapping[str, Any] | None = None, device: DeviceClass = ANY
) -> Evidence:
    """Return by which share of the predicted peak runs exceed it: that of the mechanism that is known least.

    Five in six such runs need no more. Arguments are those of :func:`step_error`. A mechanism with too few runs of the
    family has the floor, as each code base has buffers of its own.
    """
    table = (shipped() if table is None else table).get("memory", {})
    errors = (_of_memory(name, family, table, device) for name in mechanisms(layout))
    return max(errors, key=lambda one: (one.error, -one.runs))


def mechanism_error(name: str, family: str, *, memory: bool = False, device: DeviceClass = ANY) -> Evidence:
    """Return the error of one mechanism's step times, or of its peaks of memory; see :func:`step_error`."""
    if memory:
        return _of_memory(name, family, shipped().get("memory", {}), device)
    return _of_mechanism(name, family, shipped(), device, OFFLOAD_FLOOR if name in _OFFLOAD else FLOOR)


def memory_excess(family: str, architecture: str, layouts: Layouts, *, least: float = 0.0) -> Column:
    """Return the column of :func:`memory_error`'s errors, none of them below ``least``."""
    excess: Column = least
    for name, mask in uses(layouts).items():
        excess = np.where(mask, np.maximum(excess, _excess(name, family, architecture)), excess)
    return excess


@cache
def _excess(name: str, family: str, architecture: str) -> float:
    return _of_memory(name, family, shipped().get("memory", {}), DeviceClass("", architecture)).error


def _of_memory(name: str, family: str, table: Mapping[str, Any], device: DeviceClass) -> Evidence:
    evidence = _of_mechanism(name, family, table, device, MEMORY_FLOOR, figure="{spread:.1%} more")
    of_family = table.get(family, {}).get(name)
    return evidence if of_family is not None and enough(of_family) else replace(evidence, error=MEMORY_FLOOR)


def _of_mechanism(
    name: str,
    family: str,
    table: Mapping[str, Any],
    device: DeviceClass,
    floor: float,
    *,
    figure: str = "{median:.1%} median",
) -> Evidence:
    """Return the evidence on one mechanism; ``figure`` is the text of the figure that the words show."""
    of_family, everyone = table.get(family, {}).get(name), table.get("any", {}).get(name)
    accelerator, architecture = device.accelerator, device.architecture
    if of_family is not None and enough(of_family):
        alike = {**of_family, **of_family.get("architectures", {}).get(architecture, {})}
        words = f"{_counted(alike, accelerator, figure)} of {WORDS[name]} with such code"
        return Evidence(alike["spread"], words, alike["runs"])
    if everyone is None:
        return Evidence(floor, f"no published run of {WORDS[name]}", 0)
    words = f"{_counted(everyone, accelerator, figure)} of {WORDS[name]}, most with other code"
    return Evidence(max(floor, everyone["spread"]), words, everyone["runs"])


def enough(figures: Mapping[str, Any]) -> bool:
    """Return True if the figures rest on enough runs and sources to replace the floor."""
    return bool(figures["sources"] >= LEAST_SOURCES and figures["runs"] >= LEAST_RUNS)


def _counted(figures: Mapping[str, Any], accelerator: str, figure: str) -> str:
    runs, sources = figures["runs"], figures["sources"]
    several, here = "s" * (sources != 1), figures.get("devices", {}).get(accelerator, 0)
    place = f", {here:,} on {accelerator}" if accelerator else ""
    counted = f"{runs:,} published run{'s' * (runs != 1)} of {sources} source{several}"
    return f"{counted} ({figure.format(**figures)}{place})"


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


def paired_error(names: Iterable[str], table: Mapping[str, Any] | None = None) -> float:
    """Return the largest median error of predicted ratios of layouts with and without each of some mechanisms."""
    paired = (shipped() if table is None else table).get("paired", {})
    figures = (paired.get(name) for name in names)
    return max((one["median"] if one and enough(one) else PAIRED_FLOOR for one in figures), default=PAIRED_FLOOR)


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

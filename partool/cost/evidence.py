"""Errors of predictions as published runs show them, by the mechanisms that a layout uses.

``evidence.json`` is written by ``python tests/bench/replay.py RUNS.csv --memory MEMORY.csv --evidence``. For each
mechanism it has the numbers of replayed runs and sources, their median error, and the spread that plans print, by
family of code bases; under ``paired`` the errors of predicted ratios between runs of one sweep of which one has the
mechanism; and under ``fit`` how many of the runs that were predicted to fit did fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from partool.plan.layout import Layout
from partool.strategies.schedules import TEXTBOOK

LEAST_SOURCES, LEAST_RUNS = 3, 5
"""Numbers of sources and of runs below which a stated floor replaces the measured error."""
FLOOR, OFFLOAD_FLOOR, PAIRED_FLOOR = 0.25, 0.40, 0.15
"""Relative errors without enough runs: of the step time, of the step time with offload, and of the ratio of two
layouts' step times."""
WORDS = {
    "data": "data parallelism with ZeRO-0 to 2", "zero3": "ZeRO-3", "tensor": "tensor parallelism",
    "pipeline": "pipelines", "sequence": "sequence parallelism", "expert": "expert parallelism",
    "other_schedules": "less common pipeline schedules", "tensor_2d": "two-dimensional tensor parallelism",
    "offload_optimizer": "an offloaded optimizer", "offload_parameters": "offloaded parameters",
    "offload_activations": "offloaded activations",
}  # fmt: skip
"""Names of the mechanisms in sentences."""
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
    found: dict[str, Any] = json.loads((Path(__file__).parent / "evidence.json").read_text(encoding="utf-8"))
    return found


def step_error(
    layout: Layout, family: str, table: Mapping[str, Any] | None = None, *, accelerator: str = ""
) -> Evidence:
    """Return the error of a layout's step time: that of the mechanism that is known least.

    ``family`` is the kind of code base (:class:`partool.cost.stacks.Stack`). A mechanism with too few runs of the
    family has the stated floor, or the error over all code bases where that is larger. The words count the runs on
    ``accelerator`` apart.
    """
    table = shipped() if table is None else table
    found = (_of_mechanism(name, family, table, accelerator) for name in mechanisms(layout))
    return max(found, key=lambda one: (one.error, -one.runs))


def _of_mechanism(name: str, family: str, table: Mapping[str, Any], accelerator: str) -> Evidence:
    own, everyone = table.get(family, {}).get(name), table.get("any", {}).get(name)
    if own is not None and _enough(own):
        return Evidence(own["spread"], f"{_counted(own, accelerator)} of {WORDS[name]} with such code", own["runs"])
    floor = OFFLOAD_FLOOR if name in _OFFLOAD else FLOOR
    if everyone is None:
        return Evidence(floor, f"no published run of {WORDS[name]}", 0)
    words = f"{_counted(everyone, accelerator)} of {WORDS[name]}, most with other code"
    return Evidence(max(floor, everyone["spread"]), words, everyone["runs"])


def _enough(figures: Mapping[str, Any]) -> bool:
    return bool(figures["sources"] >= LEAST_SOURCES and figures["runs"] >= LEAST_RUNS)


def _counted(figures: Mapping[str, Any], accelerator: str) -> str:
    runs, sources = figures["runs"], figures["sources"]
    several, here = "s" * (sources != 1), figures.get("devices", {}).get(accelerator, 0)
    place = f", {here:,} on {accelerator}" if accelerator else ""
    counted = f"{runs:,} published run{'s' * (runs != 1)} of {sources} source{several}"
    return f"{counted} ({figures['median']:.1%} median{place})"


def fit_limit(table: Mapping[str, Any] | None = None) -> tuple[float, int, int]:
    """Return the largest probability of fitting that runs support, and how many of how many green runs fitted.

    After ``n`` runs that all fitted, the next one fits with a probability of (n + 1) / (n + 2) (Laplace's rule).
    """
    fit = (shipped() if table is None else table)["fit"]
    return (fit["fitted"] + 1) / (fit["green"] + 2), fit["fitted"], fit["green"]


def own_runs(accelerator: str) -> int:
    """Return the number of runs of partool's own runtime on an accelerator that were compared with predictions."""
    found: int = shipped()["own"].get(accelerator, 0)
    return found


def paired_error(names: Iterable[str], table: Mapping[str, Any] | None = None) -> float:
    """Return the largest median error of predicted ratios of layouts with and without each of some mechanisms."""
    paired = (shipped() if table is None else table).get("paired", {})
    known = (paired.get(name) for name in names)
    return max((one["median"] if one and _enough(one) else PAIRED_FLOOR for one in known), default=PAIRED_FLOOR)


def mechanisms(layout: Layout) -> tuple[str, ...]:
    """Return the names of the mechanisms that a layout uses, as in the table of evidence."""
    return tuple(_mechanisms(layout))


def _mechanisms(layout: Layout) -> Iterator[str]:
    mesh, offload = layout.mesh, layout.offload
    yield "zero3" if layout.data.zero == 3 else "data"
    for name, degree in (("tensor", mesh.tp), ("pipeline", mesh.pp), ("sequence", mesh.cp), ("expert", layout.expert)):
        if degree > 1:
            yield name
    if mesh.pp > 1 and layout.pipeline.schedule not in TEXTBOOK:
        yield "other_schedules"
    if layout.tensor.inner > 1:
        yield "tensor_2d"
    if offload.optimizer != "none":
        yield "offload_optimizer"
    if offload.parameters != "none":
        yield "offload_parameters"
    if offload.activations != "none":
        yield "offload_activations"

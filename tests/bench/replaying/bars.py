"""Error bars by mechanism and their judge: what left-out sources show. Plans print ``partool/cost/evidence.json``.

Each source has the weight 1, which its runs share: a sweep of a thousand runs counts as a table of five. Files of one
publication are one source (:func:`publication`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from statistics import fmean, median
from typing import Any

from partool.cost.evidence import FEW_SOURCES, DeviceClass, Evidence, mechanisms, memory_error, step_error
from partool.plan.layout import Layout
from partool.replay.predicted import Result

ABOVE, BELOW, MEMORY_ABOVE = 0.85, 0.15, 0.84
"""Weighted shares of the runs that take no longer than the upper bar, that take less than the lower bar, and that need
no more memory than the bar: five in six, as a normal distribution has below one standard deviation."""
JUDGED = 5
"""Number of sources from which on a group of left-out sources is judged."""
INSIDE, TWICE, HALF_WIDTH, MEMORY_INSIDE = (0.60, 0.80), 0.90, 0.30, (0.78, 0.90)
"""What is asked of left-out sources: the share of step times inside one bar, the least share inside two, the largest
median half-width, and the share of runs inside the bar of memory."""


@dataclass(frozen=True)
class Run:
    """A run beside its prediction."""

    source: str
    family: str
    layout: Layout
    device: DeviceClass
    experts: bool
    log_excess: float
    """Logarithm of measured over predicted."""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names of the mechanisms of the layout."""
        return mechanisms(self.layout)


def publication(source: str) -> str:
    """Return a source's name without what stands in brackets: files of one publication are one source."""
    return source.split(" (", maxsplit=1)[0]


def runs_of(results: Iterable[Result]) -> list[Run]:
    """Return the runs that measured something."""
    return [
        Run(
            publication(one.case.source),
            one.job.stack.family,
            one.layout,
            DeviceClass(one.job.devices.accelerator, one.job.devices.architecture),
            one.job.model.moe is not None,
            log(one.measured / one.predicted),
        )
        for one in results
        if one.measured
    ]


def step_bars(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the errors of step times by kind of code base and mechanism."""
    return _bars(runs, ABOVE, BELOW)


def memory_bars(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the errors of peaks of memory by kind of code base and mechanism; only what exceeds them counts."""
    return _bars(runs, MEMORY_ABOVE, None)


def first_runs(runs: Iterable[Run]) -> dict[str, Any]:
    """Return, by kind of code base, the median over sources of the median slowdown of a source's runs."""
    by: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by["any"].append(run)
        by[run.family].append(run)
    return {
        family: {
            "sources": len(each := _by_source(some)),
            "slowdown": round(exp(median(median(run.log_excess for run in one) for one in each)) - 1.0, 4),
        }
        for family, some in sorted(by.items())
    }


def _by_source(runs: Iterable[Run]) -> list[list[Run]]:
    by: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by[run.source].append(run)
    return list(by.values())


def _bars(runs: Iterable[Run], above: float, below: float | None) -> dict[str, Any]:
    by: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for name in run.mechanisms:
            by["any"][name].append(run)
            by[run.family][name].append(run)
    return {
        family: {name: _figures(some, above, below) for name, some in sorted(names.items())}
        for family, names in sorted(by.items())
    }


def _figures(runs: list[Run], above: float, below: float | None) -> dict[str, Any]:
    """Return numbers and errors of some runs; architectures with enough sources have figures of their own."""
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        alike[run.device.architecture].append(run)
    enough = {name: some for name, some in sorted(alike.items()) if name and len(_by_source(some)) >= FEW_SOURCES}
    devices = Counter(run.device.accelerator for run in runs)
    figures = _errors(runs, above, below) | {"devices": dict(devices.most_common())}
    if enough:
        figures["architectures"] = {name: _errors(some, above, below) for name, some in enough.items()}
    return figures


def _errors(runs: list[Run], above: float, below: float | None) -> dict[str, Any]:
    counts = Counter(run.source for run in runs)
    figures = {
        "runs": len(runs),
        "sources": len(counts),
        "largest": round(max(counts.values()) / len(runs), 4),
        "above": round(max(exp(weighted_quantile(runs, above)) - 1.0, 0.0), 4),
    }
    if below is not None:
        figures["below"] = round(max(1.0 - exp(weighted_quantile(runs, below)), 0.0), 4)
    return figures


def weighted_quantile(runs: list[Run], share: float) -> float:
    """Return the least logarithm of measured over predicted that a share of the sources' weight does not exceed."""
    counts = Counter(run.source for run in runs)
    weighted = sorted((run.log_excess, 1.0 / counts[run.source]) for run in runs)
    reached = accumulate(weight for _, weight in weighted)
    wanted = share * len(counts) - 1e-9
    return next(value for (value, _), total in zip(weighted, reached, strict=True) if total >= wanted)


@dataclass(frozen=True)
class HeldOut:
    """Where a run lies in the bars that the other sources give."""

    run: Run
    once: bool
    twice: bool
    half_width: float
    """Half the distance between the bars, as a share of the prediction."""


def held_out(runs: list[Run], *, memory: bool = False) -> list[HeldOut]:
    """Return where each source's runs lie in the bars that the other sources give, by source."""
    placed: list[HeldOut] = []
    for left_out in _by_source(runs):
        others = [run for run in runs if run.source != left_out[0].source]
        table = {"memory": memory_bars(others)} if memory else {"step_time": step_bars(others)}
        error_of = memory_error if memory else step_error
        placed += [_placed(run, error_of(run.layout, run.family, table, run.device), memory=memory) for run in left_out]
    return placed


def _placed(run: Run, evidence: Evidence, *, memory: bool) -> HeldOut:
    above = log(1.0 + evidence.error)
    below = float("inf") if memory else -log(1.0 - evidence.below)
    once, twice = (-bars * below <= run.log_excess <= bars * above for bars in (1, 2))
    return HeldOut(run, once, twice, 0.5 * (evidence.error + evidence.below))


Group = Callable[[Run], bool]
GROUPS: dict[str, Group] = {
    "all": lambda run: True,
    "dense": lambda run: not run.experts,
    "experts": lambda run: run.experts,
    "torch": lambda run: run.family == "torch",
    "megatron": lambda run: run.family == "megatron",
    "deepspeed": lambda run: run.family == "deepspeed",
}
"""Groups of runs that are judged, by name."""


def judge(placed: list[HeldOut], *, memory: bool = False) -> dict[str, dict[str, Any]]:
    """Return the shares of the left-out sources' runs inside the bars, by group; each source counts the same."""
    figures: dict[str, dict[str, Any]] = {}
    for name, belongs in GROUPS.items():
        by: dict[str, list[HeldOut]] = defaultdict(list)
        for one in placed:
            if belongs(one.run):
                by[one.run.source].append(one)
        if by:
            figures[name] = _judged(list(by.values()), memory=memory)
    return figures


def _judged(sources: list[list[HeldOut]], *, memory: bool) -> dict[str, Any]:
    rows = [one for each in sources for one in each]
    figures: dict[str, Any] = {
        "sources": len(sources),
        "runs": len(rows),
        "inside_one": round(fmean(fmean(one.once for one in each) for each in sources), 4),
        "inside_two": round(fmean(fmean(one.twice for one in each) for each in sources), 4),
        "runs_inside_one": round(fmean(one.once for one in rows), 4),
    }
    if not memory:
        figures["half_width"] = round(median(median(one.half_width for one in each) for each in sources), 4)
    return figures | {"verdict": _verdict(figures, memory=memory)}


def _verdict(figures: dict[str, Any], *, memory: bool) -> str:
    if figures["sources"] < JUDGED:
        return "few sources"
    least, most = MEMORY_INSIDE if memory else INSIDE
    faults = [] if least <= figures["inside_one"] <= most else [f"{figures['inside_one']:.0%} inside one bar"]
    if not memory:
        faults += [] if figures["inside_two"] >= TWICE else [f"{figures['inside_two']:.0%} inside two bars"]
        faults += [] if figures["half_width"] <= HALF_WIDTH else [f"half-width {figures['half_width']:.0%}"]
    return ", ".join(faults) or "holds"

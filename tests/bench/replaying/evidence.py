"""Errors of predictions by mechanism, from replayed runs; plans quote the table (``partool/cost/evidence.json``)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import exp, log
from statistics import median
from typing import Any

from partool.cost.evidence import DeviceClass, enough, mechanisms, memory_error, step_error
from partool.replay.predicted import Result

_WITHIN = 0.55
"""Weighted share of a mechanism's runs that lie within its spread. With this share 60 to 80 % of the runs of a source
lie within the error that the other sources give, and 90 % within twice the error."""
_MEMORY_WITHIN = 0.84
"""Weighted share of a mechanism's runs that exceed the predicted memory by no more than its spread: as many as a normal
error has below one standard deviation."""


@dataclass(frozen=True)
class Error:
    """One run's error: the logarithm of predicted over measured."""

    source: str
    log: float
    accelerator: str = ""
    architecture: str = ""


Spread = Callable[[list[Error]], float]
"""Function that makes one figure of many errors."""


def table(results: Iterable[Result]) -> dict[str, Any]:
    """Return the evidence on step times by mechanism: spread of errors, paired error, runs and sources."""
    rows = [result for result in results if result.measured]
    found = _by_family(rows, spread)
    found["paired"] = {name: figures(each, spread) for name in found.get("any", {}) if (each := pairs(rows, name))}
    return found


def memory_table(results: Iterable[Result]) -> dict[str, Any]:
    """Return the evidence on peaks of memory by mechanism; ``spread`` is by how much runs exceed their predictions."""
    return _by_family([result for result in results if result.measured], excess)


def _by_family(rows: list[Result], spread_of: Spread) -> dict[str, Any]:
    by: dict[str, dict[str, list[Error]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        assert row.measured
        devices = row.job.devices
        error = Error(row.case.source, log(row.predicted / row.measured), devices.accelerator, devices.architecture)
        for name in mechanisms(row.layout):
            by["any"][name].append(error)
            by[row.job.stack.family][name].append(error)
    return {
        family: {name: figures(errors, spread_of) for name, errors in sorted(names.items())}
        for family, names in sorted(by.items())
    }


def figures(errors: list[Error], spread_of: Spread) -> dict[str, Any]:
    """Return the figures of one mechanism: numbers of runs and sources, median and spread, and runs by accelerator.

    Architectures with enough runs and sources have figures of their own.
    """
    found = _figures(errors, spread_of)
    devices = Counter(error.accelerator for error in errors if error.accelerator)
    alike: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        alike[error.architecture].append(error)
    own = {name: _figures(each, spread_of) for name, each in sorted(alike.items()) if name}
    own = {name: one for name, one in own.items() if enough(one)}
    more = {"devices": dict(devices.most_common()), "architectures": own}
    return found | {name: one for name, one in more.items() if one}


def _figures(errors: list[Error], spread_of: Spread) -> dict[str, Any]:
    values = [abs(error.log) for error in errors]
    return {
        "runs": len(errors),
        "sources": len({error.source for error in errors}),
        "median": round(exp(median(values)) - 1.0, 4),
        "spread": round(spread_of(errors), 4),
    }


def spread(errors: list[Error]) -> float:
    """Return the relative error within which :data:`_WITHIN` of the runs lie; a source weighs the root of its runs."""
    return _reached(errors, [abs(error.log) for error in errors], _WITHIN)


def excess(errors: list[Error]) -> float:
    """Return by which share :data:`_MEMORY_WITHIN` of the runs exceed their predictions at most."""
    return _reached(errors, [max(0.0, -error.log) for error in errors], _MEMORY_WITHIN)


def _reached(errors: list[Error], values: list[float], share: float) -> float:
    """Return the relative error that a weighted share of the values does not exceed; values are logarithms."""
    counts = Counter(error.source for error in errors)
    weighted = sorted((value, counts[error.source] ** -0.5) for value, error in zip(values, errors, strict=True))
    wanted = share * sum(weight for _, weight in weighted) - 1e-9
    reached = accumulate(weight for _, weight in weighted)
    return exp(next(value for (value, _), total in zip(weighted, reached, strict=True) if total >= wanted)) - 1.0


def pairs(rows: list[Result], mechanism: str) -> list[Error]:
    """Return the errors of predicted ratios, for pairs of runs of one sweep of which only one has a mechanism.

    Both runs of a pair are of one code base: the errors of code bases are not those of a mechanism.
    """
    sweeps: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for row in rows:
        sweeps[row.case.sweep].append(row)
    return [error for sweep in sweeps.values() for error in _pairs(sweep, mechanism)]


def _pairs(sweep: list[Result], mechanism: str) -> Iterator[Error]:
    for one, other in combinations(sweep, 2):
        has = mechanism in mechanisms(one.layout), mechanism in mechanisms(other.layout)
        alike = one.job.stack.name == other.job.stack.name
        if not alike or has[0] == has[1] or not one.measured or not other.measured:
            continue
        predicted = (one.predicted / one.job.global_batch) / (other.predicted / other.job.global_batch)
        measured = (one.measured / one.job.global_batch) / (other.measured / other.job.global_batch)
        yield Error(one.case.source, log(predicted / measured))


def coverage(results: Iterable[Result], *, memory: bool = False) -> dict[str, tuple[float, float, int]]:
    """Return, per source, the shares of its runs within one and two errors, which come from the other sources only.

    Of memory, only what runs need more than predicted counts.
    """
    rows = [row for row in results if row.measured]
    found = {}
    for source in sorted({row.case.source for row in rows}):
        others = [row for row in rows if row.case.source != source]
        known = {"memory": memory_table(others)} if memory else table(others)
        mine = [row for row in rows if row.case.source == source]
        inside = [0, 0]
        for row in mine:
            assert row.measured
            off = log(row.measured / row.predicted)
            error_of, family = memory_error if memory else step_error, row.job.stack.family
            device = DeviceClass(architecture=row.job.devices.architecture)
            error = log(1.0 + error_of(row.layout, family, known, device).error)
            off = max(off, 0.0) if memory else abs(off)
            inside = [inside[0] + (off <= error), inside[1] + (off <= 2.0 * error)]
        found[source] = (inside[0] / len(mine), inside[1] / len(mine), len(mine))
    return found

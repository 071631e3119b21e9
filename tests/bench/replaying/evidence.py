"""Errors of predictions by mechanism, from replayed runs; plans quote the table (``partool/cost/evidence.json``)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import exp, log
from statistics import median
from typing import Any

from partool.cost.evidence import mechanisms, step_error
from replaying.score import Result

_WITHIN = 0.55
"""Weighted share of a mechanism's runs that lie within its spread. With this share 60 to 80 % of the runs of a source
lie within the error that the other sources give, and 90 % within twice the error."""


@dataclass(frozen=True)
class Error:
    """One run's error: the logarithm of predicted over measured."""

    source: str
    log: float
    accelerator: str = ""


def table(results: Iterable[Result]) -> dict[str, Any]:
    """Return the evidence by mechanism: spread of errors, paired error, runs and sources."""
    rows = [result for result in results if result.measured]
    by: dict[str, dict[str, list[Error]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        assert row.measured
        error = Error(row.case.source, log(row.predicted / row.measured), row.job.devices.accelerator)
        for name in mechanisms(row.layout):
            by["any"][name].append(error)
            by[row.job.stack.family][name].append(error)
    found: dict[str, Any] = {
        family: {name: figures(errors) for name, errors in sorted(names.items())}
        for family, names in sorted(by.items())
    }
    found["paired"] = {name: figures(each) for name in sorted(by["any"]) if (each := pairs(rows, name))}
    return found


def figures(errors: list[Error]) -> dict[str, Any]:
    """Return the figures of one mechanism: numbers of runs and sources, median and spread, and runs by accelerator."""
    values = [abs(error.log) for error in errors]
    found = {
        "runs": len(errors),
        "sources": len({error.source for error in errors}),
        "median": round(exp(median(values)) - 1.0, 4),
        "spread": round(spread(errors), 4),
    }
    devices = Counter(error.accelerator for error in errors if error.accelerator)
    return {**found, "devices": dict(devices.most_common())} if devices else found


def spread(errors: list[Error]) -> float:
    """Return the relative error within which :data:`_WITHIN` of the runs lie; a source weighs the root of its runs."""
    counts = Counter(error.source for error in errors)
    weighted = sorted((abs(error.log), counts[error.source] ** -0.5) for error in errors)
    wanted = _WITHIN * sum(weight for _, weight in weighted) - 1e-9
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


def coverage(results: Iterable[Result]) -> dict[str, tuple[float, float, int]]:
    """Return, per source, the shares of its runs within one and two errors, which come from the other sources only."""
    rows = [row for row in results if row.measured]
    found = {}
    for source in sorted({row.case.source for row in rows}):
        others = table(row for row in rows if row.case.source != source)
        mine = [row for row in rows if row.case.source == source]
        inside = [0, 0]
        for row in mine:
            assert row.measured
            off = abs(log(row.predicted / row.measured))
            error = log(1.0 + step_error(row.layout, row.job.stack.family, others).error)
            inside = [inside[0] + (off <= error), inside[1] + (off <= 2.0 * error)]
        found[source] = (inside[0] / len(mine), inside[1] / len(mine), len(mine))
    return found

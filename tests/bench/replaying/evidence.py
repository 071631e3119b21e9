"""Errors of predicted ratios by mechanism, from pairs of replayed runs (``paired`` in the table of evidence)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import exp, log
from statistics import median
from typing import Any

from partool.cost.evidence import mechanisms
from partool.replay.predicted import Result

_WITHIN = 0.55
"""Weighted share of a mechanism's pairs of runs that lie within the spread of their predicted ratios."""


@dataclass(frozen=True)
class Error:
    """One run's error: the logarithm of predicted over measured."""

    source: str
    log: float


def paired(results: Iterable[Result]) -> dict[str, Any]:
    """Return the errors of predicted ratios by mechanism: runs, sources, median and spread."""
    rows = [result for result in results if result.measured]
    names = sorted({name for row in rows for name in mechanisms(row.layout)})
    return {name: _figures(each) for name in names if (each := pairs(rows, name))}


def _figures(errors: list[Error]) -> dict[str, Any]:
    values = [abs(error.log) for error in errors]
    return {
        "runs": len(errors),
        "sources": len({error.source for error in errors}),
        "median": round(exp(median(values)) - 1.0, 4),
        "spread": round(spread(errors), 4),
    }


def spread(errors: list[Error]) -> float:
    """Return the error that :data:`_WITHIN` of the pairs do not exceed; a source weighs the root of its pairs."""
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

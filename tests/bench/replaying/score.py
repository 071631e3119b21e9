"""Errors of predictions: per source, without and with one scalar, the order within sweeps and what choosing
by prediction would cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median
from typing import Any

from partool.replay import measured
from partool.replay.predicted import Result

LEAST_SWEEP = 3
"""Configurations from which on a sweep is judged."""
TIE = 1e-9
"""Relative difference up to which two times are the same."""


@dataclass
class Tally:
    """The rows of one source."""

    results: list[Result] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def summary(source: str, metric: str, tally: Tally) -> dict[str, Any]:
    """Return the figures of one source."""
    pairs = [(result.predicted, result.measured) for result in tally.results if result.measured]
    errors = [predicted / truth - 1.0 for predicted, truth in pairs]
    scaled = [abs(error) for error in left_one_out(pairs)]
    stated = [
        abs(result.predicted / result.measured - 1.0)
        for result in tally.results
        if result.measured and not result.case.open
    ]
    values: dict[str, Any] = {
        "source": source, "metric": metric, "rows": len(tally.results), "skipped": sum(tally.skipped.values()),
        "bias": median(errors) if errors else None, "median": median(map(abs, errors)) if errors else None,
        "p90": quantile([abs(error) for error in errors], 0.9), "median_scaled": median(scaled) if scaled else None,
        "stated": len(stated), "median_stated": median(stated) if stated else None,
        "open": dict(Counter(name for result in tally.results for name in result.case.open).most_common()),
        "regret_mean": None, "kendall": None, "sweeps": 0, "false_fits": None, "false_rejects": None,
    }  # fmt: skip
    if metric == "step_time":
        timed = [times for times in map(times_of, sweeps(tally.results)) if len(times) >= LEAST_SWEEP]
        taus = [tau for tau in map(kendall, timed) if tau is not None]
        values["regret_mean"], values["sweeps"] = (fmean(map(regret_of, timed)) if timed else None), len(timed)
        values["kendall"] = fmean(taus) if taus else None
        values["null_median"] = null_model(tally.results)
    else:
        fitting = [result for result in tally.results if result.fits]
        values["false_fits"] = sum(not result.fits and result.verdict == "green" for result in tally.results)
        values["false_rejects"] = sum(result.verdict == "red" for result in fitting)
        values["fitting"], values["green"] = len(fitting), sum(result.verdict == "green" for result in fitting)
    values["skip_reasons"] = dict(tally.skipped.most_common())
    return values


def left_one_out(pairs: list[tuple[float, float | None]]) -> list[float]:
    """Return each row's error after a scalar: the median of measured over predicted of the other rows."""
    ratios = [truth / predicted for predicted, truth in pairs if truth]
    if len(ratios) < 2:
        return []
    return [median(ratios[:index] + ratios[index + 1 :]) / ratio - 1.0 for index, ratio in enumerate(ratios)]


def overall(summaries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a metric over its sources, each of which counts the same whatever its number of rows."""
    rated = [one for one in summaries if one["median"] is not None]
    taus = [one["kendall"] for one in rated if one["kendall"] is not None]
    regrets = [one["regret_mean"] for one in rated if one["regret_mean"] is not None]
    return {
        "sources": len(rated),
        "median_of_medians": median(one["median"] for one in rated) if rated else None,
        "worst_median": max(one["median"] for one in rated) if rated else None,
        "median_of_biases": median(one["bias"] for one in rated) if rated else None,
        "sources_too_low": sum(one["bias"] < 0 for one in rated),
        "kendall": fmean(taus) if taus else None,
        "regret_mean": fmean(regrets) if regrets else None,
        "sources_with_sweeps": len(regrets),
    }


def sweeps(results: list[Result]) -> list[list[Result]]:
    """Return the rows of each sweep: runs of one source that differ only in their configuration."""
    by: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        by[result.case.sweep].append(result)
    return list(by.values())


def times_of(rows: list[Result]) -> list[tuple[float, float]]:
    """Return the predicted and measured seconds per sequence of the rows that have a time."""
    return [(row.per_sequence_s, row.measured / row.job.global_batch) for row in rows if row.measured]


def regret_of(times: list[tuple[float, float]]) -> float:
    """Return how much slower than the best the configuration is that was predicted to be the best."""
    least = min(predicted for predicted, _ in times)
    chosen = fmean(truth for predicted, truth in times if predicted <= least * (1.0 + TIE))
    return chosen / min(truth for _, truth in times) - 1.0


def kendall(times: list[tuple[float, float]]) -> float | None:
    """Return Kendall's tau-b of predicted and measured times; None where one of them is the same in all rows.

    M. G. Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945).
    """
    signs = [(_sign(a[0], b[0]), _sign(a[1], b[1])) for a, b in combinations(times, 2)]
    predicted, truth = (sum(each[at] != 0 for each in signs) for at in (0, 1))
    return sum(a * b for a, b in signs) / (predicted * truth) ** 0.5 if predicted and truth else None


def _sign(first: float, second: float) -> int:
    """Return 1 or -1 as the second time is longer or shorter, 0 if both are the same."""
    return 0 if abs(second / first - 1.0) <= TIE else 1 if second > first else -1


def null_model(results: list[Result]) -> float | None:
    """Return the median error of a constant share of the peak per device, left out the row itself."""
    by_device: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for row in results:
        ideal = measured.counted_flops(row.case.cells, row.job) / row.layout.mesh.world_size
        by_device[row.case.cells.text("gpu")].append((ideal, row.measured))
    errors = [abs(error) for pairs in by_device.values() for error in left_one_out(pairs)]
    return median(errors) if errors else None


def quantile(values: list[float], share: float) -> float | None:
    """Return a quantile, the nearest value above."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None

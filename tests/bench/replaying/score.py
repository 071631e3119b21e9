"""Errors of predictions: per source, without and with one scalar, and what choosing by prediction would cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from partool.replay import measured
from partool.replay.predicted import Result


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
        "regret_mean": None, "false_fits": None, "false_rejects": None,
    }  # fmt: skip
    if metric == "step_time":
        regrets = [regret for regret in map(regret_of, sweeps(tally.results)) if regret is not None]
        values["regret_mean"], values["sweeps"] = (fmean(regrets) if regrets else None), len(regrets)
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


def sweeps(results: list[Result]) -> list[list[Result]]:
    """Return the sweeps of at least three configurations."""
    found: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        found[result.case.sweep].append(result)
    return [rows for rows in found.values() if len(rows) >= 3]


def regret_of(rows: list[Result]) -> float | None:
    """Return how much slower than the best the configuration is that was predicted to be the best."""
    timed = [
        (row.predicted / row.job.global_batch, row.measured / row.job.global_batch) for row in rows if row.measured
    ]
    if len(timed) < 3:
        return None
    least = min(predicted for predicted, _ in timed)
    chosen = fmean(truth for predicted, truth in timed if predicted <= least * (1.0 + 1e-9))
    return chosen / min(truth for _, truth in timed) - 1.0


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

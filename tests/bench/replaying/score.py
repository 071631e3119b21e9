"""Errors of predictions: per source, without and with one scalar, and what choosing by prediction would cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from partool.cost.case import RECOMPUTE, TrainingJob
from partool.cost.memory.peak import predict_memory, rank_memories
from partool.cost.time.predict import predict_time
from partool.plan.layout import Layout
from replaying import measured
from replaying.cases import Case

_PLAUSIBLE = 1.25
"""Predicted over actual memory up to which a reading is believed: the run did fit, and predictions are this far off."""


@dataclass(frozen=True)
class Result:
    """One predicted row."""

    case: Case
    job: TrainingJob
    layout: Layout
    predicted: float
    measured: float | None
    verdict: str = ""
    fits: bool = True


@dataclass
class Tally:
    """The rows of one source."""

    results: list[Result] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def time_result(case: Case) -> Result | None:
    """Return the predicted and measured step time of a row, by its most plausible reading; None without a time.

    Of several readings, those that may fit come first, then those that recompute least: recomputation is stated where
    it is unusual. Of the rest the fastest is taken: settings that published tables leave out were tuned.
    """
    best: tuple[float, float, float, Result] | None = None
    for job, layout in case.options:
        seconds = measured.step_s(case.cells, job, layout)
        if seconds is None:
            return None
        predicted = predict_time(job, layout, 1).step_time_s
        over = _over(job, layout) if len(case.options) > 1 else 0.0
        # Readings may differ in their batch: compare time per sequence.
        again = sum(map(RECOMPUTE.index, layout.recompute)) / len(layout.recompute)
        key = (over, again, predicted / job.global_batch)
        if best is None or key < best[:3]:
            best = (*key, Result(case, job, layout, predicted, seconds))
    return best[3] if best else None


def _over(job: TrainingJob, layout: Layout) -> float:
    """Return by how much a reading lies above what a run that was published can have needed, in capacities."""
    found = predict_memory(job, layout, 0.0)
    used = found.total_bytes / max(found.capacity_bytes, 1)
    return 0.0 if used <= _PLAUSIBLE else used


def memory_result(case: Case) -> Result | None:
    """Return the predicted and measured peak of a row, and whether it was predicted to fit.

    Of several readings of a row that ran, the first that may fit is taken, else the smallest. Where readings disagree
    whether a run fits, nobody can be sure of it: amber. A micro-batch that is not stated is the smallest.
    """
    kind, value = measured.reading(case.cells), measured.peak_bytes(case.cells)
    fits = not case.cells.lower("fits").startswith("no")
    if value is None and fits:
        return None
    least = min(layout.micro_batch for _, layout in case.options)
    options = [(job, layout) for job, layout in case.options if layout.micro_batch == least]
    found = [(predict_memory(job, layout, 0.0), job, layout) for job, layout in options]
    smallest = min(found, key=lambda one: one[0].total_bytes)
    prediction, job, layout = next((one for one in found if one[0].verdict != "red"), smallest)
    verdicts = {one[0].verdict for one in found}
    verdict = prediction.verdict if len(verdicts) == 1 else "amber"
    worst = max(rank_memories(job, layout), key=lambda memory: float(memory.total_bytes))
    read = float(worst.total_bytes)
    if kind != "device":
        read -= float(worst.outside_bytes)
    if kind == "allocated":
        read -= float(worst.terms["fragmentation"])
    return Result(case, job, layout, read, value if fits else None, verdict, fits)


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

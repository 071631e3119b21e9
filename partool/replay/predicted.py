"""Predictions of rows, beside what the rows measured."""

from __future__ import annotations

from dataclasses import dataclass

from partool.cost.case import RECOMPUTE
from partool.cost.training.peak import predict_memory, rank_memories
from partool.cost.training.predict import predict_time
from partool.plan.layout import Layout
from partool.replay import measured
from partool.replay.cases import RunCase
from partool.work.training import TrainingWork

_PLAUSIBLE = 1.25
"""Predicted over actual memory up to which a reading is believed: the run did fit, and predictions are this far off."""


@dataclass(frozen=True)
class Result:
    """One predicted row."""

    case: RunCase
    job: TrainingWork
    layout: Layout
    predicted: float
    measured: float | None
    verdict: str = ""
    fits: bool = True

    @property
    def per_sequence_s(self) -> float:
        """Predicted seconds per sequence of the global batch, by which readings with other batches compare."""
        return self.predicted / self.job.global_batch


def time_result(case: RunCase) -> Result | None:
    """Return the predicted and measured step time of a row, by its most plausible reading; None without a time.

    Of the most plausible readings the fastest is taken: settings that published tables leave out were tuned.
    """
    best: Result | None = None
    for job, layout in plausible(case):
        seconds = measured.step_s(case.cells, job, layout)
        if seconds is None:
            return None
        result = Result(case, job, layout, predict_time(job, layout, 1).step_time_s, seconds)
        if best is None or result.per_sequence_s < best.per_sequence_s:
            best = result
    return best


def plausible(case: RunCase) -> list[tuple[TrainingWork, Layout]]:
    """Return the most plausible readings of a row: those that may fit, and of these those that recompute least.

    A run that recomputes activations usually says so.
    """
    if len(case.options) == 1:
        return list(case.options)
    keys = [
        (_over(job, layout), sum(map(RECOMPUTE.index, layout.recompute)) / len(layout.recompute))
        for job, layout in case.options
    ]
    return [option for option, key in zip(case.options, keys, strict=True) if key == min(keys)]


def _over(job: TrainingWork, layout: Layout) -> float:
    """Return by how much a reading lies above what a run that was published can have needed, in capacities."""
    prediction = predict_memory(job, layout, 0.0)
    used = prediction.total_bytes / max(prediction.capacity_bytes, 1)
    return 0.0 if used <= _PLAUSIBLE else used


def memory_result(case: RunCase) -> Result | None:
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
    predictions = [(predict_memory(job, layout, 0.0), job, layout) for job, layout in options]
    smallest = min(predictions, key=lambda one: one[0].total_bytes)
    prediction, job, layout = next((one for one in predictions if one[0].verdict != "red"), smallest)
    verdicts = {one[0].verdict for one in predictions}
    verdict = prediction.verdict if len(verdicts) == 1 else "amber"
    worst = max(rank_memories(job, layout), key=lambda memory: float(memory.total_bytes))
    read = float(worst.total_bytes)
    if kind != "device":
        read -= float(worst.outside_bytes)
    if kind == "allocated":
        read -= float(worst.terms["fragmentation"])
    return Result(case, job, layout, read, value if fits else None, verdict, fits)

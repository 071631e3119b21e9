"""What validations decide: which checkpoints are kept as the best, and whether the run ends early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from partool.plan.record import DamagedRecordError
from partool.plan.types import Plan
from partool.plan.validations import Validations, read_validations, write_validations
from partool.spec.judging import EarlyStop
from partool_runtime.checkpoint import steps_in

_EARLY = "early stop"


class ValidationVerdict(NamedTuple):
    """What follows from a validation, equal on all ranks."""

    best: bool
    """Whether its weights are to be kept in a checkpoint."""
    ended: str
    """Why the run ends with it; empty if the run goes on. Rank 0 has the figures, too."""


class Keeper:
    """Judges validations by the plan's ``checkpoint.best`` and ``training.early_stop``.

    Rank 0 keeps the record of the validations in ``folder``, that of the checkpoints, and decides; the others follow.
    """

    def __init__(self, plan: Plan, folder: Path, *, rank: int, maximum_over_ranks: Callable[[int], int]) -> None:
        """Take the plan; ``maximum_over_ranks`` returns the largest of the ranks' numbers and is a collective."""
        self._best, self._stop = plan.checkpoint.best, plan.training.early_stop
        self._folder = folder
        self._first = rank == 0
        self._maximum_over_ranks = maximum_over_ranks
        self._validations = Validations()
        self._saved: set[int] = set()
        """Steps with a checkpoint, also those that were deleted since, whose validations are not the best."""
        self.notes: list[str] = []
        """What the user must learn about the record that :meth:`begin` has read."""

    def begin(self, step: int) -> None:
        """Take the validations up to ``step``, from which training goes on; later ones were of another training."""
        if not self._first:
            return
        try:
            recorded = read_validations(self._folder)
        except DamagedRecordError as error:
            self.notes.append(f"PT626: {error}; the best validations so far are not known any more")
            recorded = Validations()
        self._validations = recorded.until(step)
        self._saved = {saved for saved in steps_in(self._folder) if saved <= step}
        if self._validations != recorded or self.notes:
            write_validations(self._folder, self._validations)

    def saved(self, step: int) -> None:
        """Take a checkpoint that is being written."""
        self._saved.add(step)

    def kept(self) -> Collection[int]:
        """Return the steps of complete checkpoints that are kept as the best; rank 0 calls it, from any thread."""
        if self._best is None:
            return ()
        return self._validations.best(self._best, self._best.keep, steps_in(self._folder))

    def judge(self, step: int, figures: Mapping[str, float]) -> ValidationVerdict:
        """Record the validation after ``step`` steps, and return what follows from it; a collective."""
        if self._best is None and self._stop is None:
            return ValidationVerdict(best=False, ended="")
        best, ended = self._decide(step, figures) if self._first else (False, "")
        decided = self._maximum_over_ranks(2 * bool(ended) + best)
        return ValidationVerdict(bool(decided & 1), ended or (_EARLY if decided & 2 else ""))

    def _decide(self, step: int, figures: Mapping[str, float]) -> tuple[bool, str]:
        validations = self._validations.noted(step, figures)
        best = self._best is not None and step in validations.best(self._best, self._best.keep, self._saved | {step})
        ended = "" if self._stop is None else reason(validations, self._stop)
        self._validations = validations.model_copy(update={"ended": ended})
        write_validations(self._folder, self._validations)
        return best, ended


def reason(validations: Validations, stop: EarlyStop) -> str:
    """Return why a run ends after its last validation, in words; empty if it goes on."""
    count = validations.without_improvement(stop)
    if count < stop.patience:
        return ""
    best = validations.best(stop, 1, [row.step for row in validations.rows])
    value = next((row.figures[stop.metric] for row in validations.rows if row.step in best), None)
    where = "" if value is None else f"; the best was {value:.6g} after step {best[0]}"
    by = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    times = "validation" if count == 1 else f"{count} validations"
    return f"{_EARLY}: {stop.metric} has not improved{by} in the last {times}{where}"

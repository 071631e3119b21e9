"""The record of a run's validations, beside its checkpoints, and what follows from it: the best ones, and patience.

``validations.json`` has a row for each validation of the training that the checkpoints belong to. Which checkpoints are
the best, and for how many validations nothing has improved, is computed from these rows and from the folders of
checkpoints, so that a crash between two writes loses neither.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from partool.plan.record import Count, DamagedRecordError, Number, Record, damage
from partool.spec.judging import EarlyStop, Judgement

VALIDATIONS_FILE = "validations.json"


class ValidationRow(Record):
    """The figures of one validation; those that are not finite are left out."""

    step: Count
    figures: dict[str, Number]


class Validations(Record):
    """The validations of a training, one row per step, in the order of the steps."""

    rows: tuple[ValidationRow, ...] = ()
    ended: str = ""
    """Why the last validation ended the run, in words; empty if it did not."""

    def until(self, step: int) -> Validations:
        """Return the rows up to ``step``, from whose checkpoint the run goes on."""
        return Validations(rows=tuple(row for row in self.rows if row.step <= step))

    def noted(self, step: int, figures: Mapping[str, float]) -> Validations:
        """Return the rows before ``step``, followed by a row of this step."""
        finite = {name: value for name, value in figures.items() if abs(value) <= 1e30}
        return Validations(rows=(*self.until(step - 1).rows, ValidationRow(step=step, figures=finite)))

    def best(self, judged: Judgement, keep: int, among: Collection[int]) -> list[int]:
        """Return the ``keep`` steps ``among`` these whose validations are the best, best first; ties: the earlier."""
        sign = 1.0 if judged.better == "min" else -1.0
        rows = [row for row in self.rows if row.step in among and judged.metric in row.figures]
        return [row.step for row in sorted(rows, key=lambda row: (sign * row.figures[judged.metric], row.step))[:keep]]

    def without_improvement(self, stop: EarlyStop) -> int:
        """Return the number of validations since the last one that improved by more than ``min_delta``."""
        sign, lowest, count = (1.0 if stop.better == "min" else -1.0), float("inf"), 0
        for row in self.rows:
            value = sign * row.figures.get(stop.metric, float("inf") * sign)
            improved = value < lowest - stop.min_delta
            lowest, count = (value, 0) if improved else (lowest, count + 1)
        return count


def read_validations(folder: Path) -> Validations:
    """Return the record in a folder of checkpoints; an empty one without a file. Raises DamagedRecordError, OSError."""
    file = folder / VALIDATIONS_FILE
    try:
        return Validations.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return Validations()
    except ValidationError as error:
        raise DamagedRecordError(f"{file}: {damage(error)}") from None


def write_validations(folder: Path, validations: Validations) -> None:
    """Replace the record: a reader sees the old or the new one, and the new one is on the disk. Raises OSError."""
    file, temporary = folder / VALIDATIONS_FILE, folder / f".{VALIDATIONS_FILE}.{os.getpid()}"
    with temporary.open("wb") as stream:
        stream.write(validations.model_dump_json(indent=1).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)

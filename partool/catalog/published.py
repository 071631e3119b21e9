"""The best model FLOPs utilization that published runs reached on a device.

``published_mfu.json`` is written by ``python tests/bench/replay.py RUNS.csv --memory MEMORY.csv --evidence`` from
``tests/data/measured_runs.csv``, with FLOPs counted as plans count them and the source of each figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FEW_RUNS = 10
"""Number of published runs below which their best says little about what a device reaches."""


@dataclass(frozen=True)
class PublishedMfu:
    """The best of some published runs."""

    mfu: float
    """Model FLOPs over the time of the step and the peak of the devices."""
    model: str
    source: str
    runs: int
    """Number of published runs that it is the best of."""

    @property
    def few(self) -> bool:
        """True if the runs are too few to doubt a price above them."""
        return self.runs < FEW_RUNS


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((Path(__file__).parent / "published_mfu.json").read_text(encoding="utf-8"))
    return table


def published_mfu(accelerator: str, precision: str) -> PublishedMfu | None:
    """Return the best published run on an accelerator in a precision; None where no run is known."""
    row = _table().get(accelerator, {}).get(precision)
    return None if row is None else PublishedMfu(row["mfu"], row["model"], row["source"], row["runs"])

"""Compute the ratios (scalars) of measured to predicted time and memory from finished runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from partool.catalog.profile_file import Scalar, StackScalars
from partool.plan.run_rows import LEAST_STEPS

_NORMAL = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""


@dataclass(frozen=True)
class Fit:
    """Ratios (scalars) of measured to predicted figures, and the numbers of rows that were not used."""

    scalars: tuple[StackScalars, ...]
    """Scalars of each software stack; empty if no row is usable."""
    left_out: dict[str, int]
    """Number of rows that were not used, by reason."""


def fit_scalars(rows: Iterable[Mapping[str, str]], *, accelerator: str, figures_hash: str, version: str) -> Fit:
    """Return, per software stack, the median over runs of the ratios of measured to predicted figures.

    Each prediction is first divided by the scalar that it already contains. A row is used if this version predicted it
    with the machine's present figures (``figures_hash``, empty for the catalog's); of a resumed run, only the longest
    attempt is used.
    """
    left_out: Counter[str] = Counter()
    longest: dict[tuple[str, str], Mapping[str, str]] = {}
    for row in rows:
        if reason := _unusable(row, accelerator, figures_hash, version):
            left_out[reason] += 1
            continue
        key = row["stack"], row["url_or_repo_path"]
        if key in longest:
            left_out["another attempt of the run was longer"] += 1
        if key not in longest or int(row["steps"]) > int(longest[key]["steps"]):
            longest[key] = row
    stacks = sorted({stack for stack, _ in longest})
    return Fit(tuple(_of(stack, [row for key, row in longest.items() if key[0] == stack]) for stack in stacks),
               dict(left_out))  # fmt: skip


def scalar(ratios: Sequence[float]) -> Scalar | None:
    """Return the median of ratios with their spread; None if ``ratios`` is empty."""
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.median(logs)
    spread = _NORMAL * statistics.median(abs(value - middle) for value in logs)
    return Scalar(value=math.exp(middle), n=len(ratios), spread=spread)


def _of(stack: str, rows: Sequence[Mapping[str, str]]) -> StackScalars:
    times = [_ratio(row, "step_time_s", "predicted_step_time_s", "time_scalar") for row in rows]
    memory = [_ratio(row, "measured_memory_bytes", "predicted_memory_bytes", "memory_scalar") for row in rows]
    return StackScalars(
        stack=stack,
        time=scalar([ratio for ratio in times if ratio is not None]),
        memory=scalar([ratio for ratio in memory if ratio is not None]),
    )


def _ratio(row: Mapping[str, str], measured: str, predicted: str, scalar_column: str) -> float | None:
    values = _number(row, measured), _number(row, predicted), _number(row, scalar_column)
    if None in values:
        return None
    observed, expected, factor = (value or 0.0 for value in values)
    return observed * factor / expected


def _number(row: Mapping[str, str], column: str) -> float | None:
    """Return the number in a column of a row; None if the number is missing or not positive."""
    try:
        value = float(row.get(column, ""))
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _unusable(row: Mapping[str, str], accelerator: str, figures_hash: str, version: str) -> str:
    if not row.get("stack") or _ratio(row, "step_time_s", "predicted_step_time_s", "time_scalar") is None:
        return "no prediction of partool beside the measurement"
    if (_number(row, "steps") or 0) < LEAST_STEPS:
        return f"fewer than {LEAST_STEPS} steps"
    if row.get("gpu") != accelerator:
        return f"not on {accelerator}"
    if row.get("partool_version") != version:
        return "predicted by another version of partool"
    if row.get("calibration", "") != figures_hash:
        return "predicted with other figures of the machine"
    return ""

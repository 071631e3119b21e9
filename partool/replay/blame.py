"""Which mechanism of the cost model is off: its rows err beyond its stated error, in themselves and beside other rows.

Rows of one kind of code base are split by the mechanism that is off and explains most of their errors (medians, with
the sum of absolute errors as the loss). What is left without its rows is split again, until nothing is off. So an error
that rows with several mechanisms have is put down to one of them only. An error that all rows share is of no mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from statistics import median

from partool.cost.evidence import WORDS, DeviceClass, mechanism_error
from partool.replay.audit import Metric, PricedRow

LEAST_ROWS = 3
"""Rows from which on a mechanism is named: one odd row does not move the median of three."""
_EXPLAINED = 0.2
"""Share of the distance of a mechanism's rows from the other rows' median that their own median has to explain."""


@dataclass(frozen=True)
class Off:
    """Rows that err beyond the stated error."""

    metric: Metric
    family: str
    names: tuple[str, ...]
    """Mechanisms that these rows have and others have not; several if the same rows have them; none for all rows
    without a mechanism that is off."""
    rows: int
    assumed: int
    """Rows among these that leave settings open, so that the error may lie in what was assumed for them."""
    error: float
    """Median of predicted over measured, less one."""
    others: float | None
    """The same of the rows without the mechanism; None if there are none."""
    stated: float
    """Stated error."""

    @property
    def words(self) -> str:
        """A sentence about the error."""
        what = " or ".join(WORDS[name] for name in self.names) or "rows of any layout"
        low, high = ("fast", "slow") if self.metric == "time" else ("small", "large")
        side = low if self.error < 0 else high
        share = f"{100 * abs(self.error):.0f} % too {side}"
        who = what if self.metric == "time" else f"the memory of {what}"
        verb = "are" if self.metric == "time" else "is"
        some = f", {self.assumed} of them with settings left open" if self.assumed else ""
        beside = "" if self.others is None else f"; without: {100 * self.others:+.0f} %"
        return (
            f"{who} {verb} predicted {share} (n = {self.rows}{some}; {self.family}; "
            f"stated error {100 * self.stated:.0f} %{beside})"
        )


def blamed(rows: Iterable[PricedRow]) -> list[Off]:
    """Return what is off, by metric and kind of code base, the largest error first."""
    groups: dict[tuple[Metric, str], list[PricedRow]] = {}
    for row in rows:
        groups.setdefault((row.metric, row.family), []).append(row)
    faults = [off for (metric, family), each in sorted(groups.items()) for off in _blamed(metric, family, each)]
    return sorted(faults, key=lambda off: -abs(log(1.0 + off.error)))


def _blamed(metric: Metric, family: str, rows: list[PricedRow]) -> list[Off]:
    faults: list[Off] = []
    rest = rows
    while split := _best_split(metric, family, rest):
        off, rest = split
        faults.append(off)
    if len(rest) >= LEAST_ROWS and (off_all := _off(metric, family, (), rest, [])):
        faults.append(off_all)
    return faults


def _best_split(metric: Metric, family: str, rows: list[PricedRow]) -> tuple[Off, list[PricedRow]] | None:
    """Return the mechanisms that are off and explain most of the rows' errors, and the rows that do not have them."""
    best: tuple[float, Off, list[PricedRow]] | None = None
    for names, lines in _kinds(rows).items():
        inside = [row for row in rows if row.line in lines]
        outside = [row for row in rows if row.line not in lines]
        if len(inside) < LEAST_ROWS or not outside or (off := _off(metric, family, names, inside, outside)) is None:
            continue
        before, after = _loss(inside, outside), _loss(inside, inside)
        if after <= (1.0 - _EXPLAINED) * before and (best is None or before - after > best[0]):
            best = before - after, off, outside
    return best and best[1:]


def _kinds(rows: list[PricedRow]) -> dict[tuple[str, ...], frozenset[int]]:
    """Return the lines of the rows with each mechanism; mechanisms of the same rows stand together."""
    by: dict[frozenset[int], tuple[str, ...]] = {}
    for name in WORDS:
        lines = frozenset(row.line for row in rows if name in row.mechanisms)
        by[lines] = (*by.get(lines, ()), name)
    return {names: lines for lines, names in by.items()}


def _loss(rows: list[PricedRow], others: list[PricedRow]) -> float:
    """Return the sum of distances of errors from the median error of ``others``."""
    middle = median(row.log_error for row in others)
    return sum(abs(row.log_error - middle) for row in rows)


def _off(
    metric: Metric, family: str, names: tuple[str, ...], rows: list[PricedRow], others: list[PricedRow]
) -> Off | None:
    """Return the error of some rows if it is beyond the stated one, in itself and beside the ``others``'."""
    error = median(row.log_error for row in rows)
    beside = median(row.log_error for row in others) if others else None
    stated = _stated(metric, family, names, rows)
    limit = log(1.0 + stated)
    if abs(error) <= limit or (beside is not None and abs(error - beside) <= limit):
        return None
    if beside is not None and abs(beside) > abs(error):
        return None  # the others are off, and these are those without
    elsewhere = None if beside is None else exp(beside) - 1.0
    return Off(
        metric, family, names, len(rows), sum(bool(row.open) for row in rows), exp(error) - 1.0, elsewhere, stated
    )


def _stated(metric: Metric, family: str, names: tuple[str, ...], rows: list[PricedRow]) -> float:
    """Return the largest stated error of mechanisms, on the devices of most rows; without names that of the rows."""
    if not names:
        return median(row.stated_error for row in rows)
    kinds = [row.result.job.devices.architecture for row in rows]
    device = DeviceClass(architecture=max(kinds, key=kinds.count))
    return max(mechanism_error(name, family, memory=metric == "memory", device=device).error for name in names)

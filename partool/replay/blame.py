"""Which mechanism of the cost model is off: rows that have it err beyond its stated error, and rows without it less.

Rows of one kind of code base are split by the mechanism that explains most of their errors, then by the next one, until
no split explains a fifth of what is left (forward selection of medians, with the sum of absolute errors as the loss).
Errors that all rows share belong to no mechanism; a scalar covers these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log
from statistics import median

from partool.cost.evidence import WORDS, DeviceClass, mechanism_error
from partool.replay.audit import Metric, Priced

LEAST_ROWS = 3
"""Rows from which on a mechanism is named: one odd row does not move the median of three."""
_EXPLAINED = 0.2
"""Share of the remaining errors that a split has to explain."""


@dataclass(frozen=True)
class Off:
    """Rows that err beyond the stated error."""

    metric: Metric
    family: str
    names: tuple[str, ...]
    """Mechanisms that these rows have and others have not; several if the same rows have them; none for all rows."""
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
        what = " or ".join(WORDS[name] for name in self.names) or "all rows, whatever their layout,"
        low, high = ("fast", "slow") if self.metric == "time" else ("small", "large")
        side = low if self.error < 0 else high
        share = f"{100 * abs(self.error):.0f} % too {side}"
        who = what if self.metric == "time" else f"the memory of {what}"
        verb = "are" if self.metric == "time" or not self.names else "is"
        some = f", {self.assumed} of them with settings left open" if self.assumed else ""
        beside = "" if self.others is None else f"; without: {100 * self.others:+.0f} %"
        return (
            f"{who} {verb} predicted {share} (n = {self.rows}{some}; {self.family}; "
            f"stated error {100 * self.stated:.0f} %{beside})"
        )


def blamed(rows: Iterable[Priced]) -> list[Off]:
    """Return what is off, by metric and kind of code base, the largest error first."""
    groups: dict[tuple[Metric, str], list[Priced]] = {}
    for row in rows:
        groups.setdefault((row.metric, row.family), []).append(row)
    found = [off for (metric, family), each in sorted(groups.items()) for off in _blamed(metric, family, each)]
    return sorted(found, key=lambda off: -abs(log(1.0 + off.error)))


def _blamed(metric: Metric, family: str, rows: list[Priced]) -> list[Off]:
    if len(rows) < LEAST_ROWS:
        return []
    left = [row.log_error for row in rows]
    found: list[Off] = []
    explained: set[int] = set()
    for _ in WORDS:
        split = _best_split(rows, left)
        if split is None:
            break
        names, inside, left = split
        off = _off(metric, family, names, [row for row, here in zip(rows, inside, strict=True) if here],
                   [row for row, here in zip(rows, inside, strict=True) if not here])  # fmt: skip
        if off is not None:
            found.append(off)
            explained |= {index for index, here in enumerate(inside) if here}
    others = [row for index, row in enumerate(rows) if index not in explained]
    everywhere = _off(metric, family, (), others, []) if len(others) >= LEAST_ROWS else None
    return [*found, everywhere] if everywhere is not None else found


def _best_split(rows: list[Priced], left: list[float]) -> tuple[tuple[str, ...], list[bool], list[float]] | None:
    """Return the mechanisms that explain most of the errors ``left``, which rows have them, and what is left then."""
    middle = median(left)
    loss = sum(abs(value - middle) for value in left)
    best: tuple[tuple[float, float], tuple[str, ...], list[bool], list[float]] | None = None
    for name in WORDS:
        inside = [name in row.mechanisms for row in rows]
        if sum(inside) < LEAST_ROWS or all(inside):
            continue
        if best is not None and inside == best[2]:
            best = (best[0], (*best[1], name), *best[2:])
            continue
        with_it, without = (median(_where(left, inside, wanted)) for wanted in (True, False))
        rest = [value - (with_it if here else without) for value, here in zip(left, inside, strict=True)]
        rank = loss - sum(map(abs, rest)), abs(with_it) - abs(without)
        if best is None or rank > best[0]:
            best = rank, (name,), inside, rest
    if best is None or best[0][0] <= max(_EXPLAINED * loss, 1e-9):
        return None
    return best[1:]


def _where(values: list[float], inside: list[bool], wanted: bool) -> list[float]:
    return [value for value, here in zip(values, inside, strict=True) if here is wanted]


def _off(metric: Metric, family: str, names: tuple[str, ...], rows: list[Priced], others: list[Priced]) -> Off | None:
    """Return the error of some rows if it is beyond the stated one, and, for mechanisms, larger than the others'."""
    error = median(row.log_error for row in rows)
    beside = median(row.log_error for row in others) if others else None
    stated = _stated(metric, family, names, rows)
    if abs(error) <= log(1.0 + stated) or (beside is not None and abs(error) <= abs(beside)):
        return None
    elsewhere = None if beside is None else exp(beside) - 1.0
    return Off(
        metric, family, names, len(rows), sum(bool(row.open) for row in rows), exp(error) - 1.0, elsewhere, stated
    )


def _stated(metric: Metric, family: str, names: tuple[str, ...], rows: list[Priced]) -> float:
    """Return the largest stated error of mechanisms, on the devices of most rows; without names that of the rows."""
    if not names:
        return median(row.stated_error for row in rows)
    kinds = [row.result.job.devices.architecture for row in rows]
    device = DeviceClass(architecture=max(kinds, key=kinds.count))
    return max(mechanism_error(name, family, memory=metric == "memory", device=device).error for name in names)

"""All rows of a table, predicted and compared with what they measured, and the errors by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from pathlib import Path
from statistics import median
from typing import Literal

from partool.cost.evidence import DeviceClass, mechanisms, memory_error, step_error
from partool.replay.cases import RunCase, SkipError, case_of
from partool.replay.cells import Cells
from partool.replay.measured import partial_peak
from partool.replay.predicted import Result, memory_result, time_result
from partool.replay.table import MEASURES, RunTable, read_table

Metric = Literal["time", "memory"]
Group = Literal["source", "stack", "mechanism"]
UNKNOWN = "(no source)"
"""Source of rows that name none."""


@dataclass(frozen=True)
class PricedRow:
    """A row that was predicted and measured."""

    line: int
    """Number of the row's first line in the file."""
    metric: Metric
    result: Result
    measured: float
    """Seconds, or bytes."""

    @property
    def source(self) -> str:
        """Where the row comes from, in its own words."""
        return self.result.case.source or UNKNOWN

    @property
    def stack(self) -> str:
        """Name of the code base."""
        return self.result.job.stack.name

    @property
    def family(self) -> str:
        """Kind of code base, by which stated errors are counted."""
        return self.result.job.stack.family

    @property
    def accelerator(self) -> str:
        """Name of the device in the catalog."""
        return self.result.job.devices.accelerator

    @property
    def open(self) -> tuple[str, ...]:
        """Settings that the row does not state, though they change the prediction."""
        if self.metric == "time":
            return self.result.case.open
        irrelevant = ("network", "global_batch") if self.result.layout.mesh.pp == 1 else ("network",)
        return tuple(name for name in self.result.case.open if name not in irrelevant)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.result.predicted / self.measured - 1.0

    @property
    def log_error(self) -> float:
        """Logarithm of predicted over measured."""
        return log(self.result.predicted / self.measured)

    @cached_property
    def mechanisms(self) -> tuple[str, ...]:
        """Names of the mechanisms of the row's layout (:data:`partool.cost.evidence.WORDS`)."""
        return mechanisms(self.result.layout)

    @property
    def stated_error(self) -> float:
        """Relative error that a plan of this layout states for itself."""
        devices = self.result.job.devices
        device = DeviceClass(devices.accelerator, devices.architecture)
        error_of = step_error if self.metric == "time" else memory_error
        return error_of(self.result.layout, self.family, device=device).error


@dataclass(frozen=True)
class Unread:
    """A row without a prediction."""

    line: int
    reason: str


@dataclass(frozen=True)
class OutOfMemory:
    """A row that ran out of memory, so that it has no peak."""

    line: int
    verdict: str
    """What a plan would have said: green, amber or red."""


@dataclass
class Audit:
    """A table of runs, compared with predictions."""

    file: str
    rows: int
    priced: list[PricedRow] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    """Columns that nothing reads."""

    def of(self, metric: Metric) -> list[PricedRow]:
        """Return the rows of one metric."""
        return [row for row in self.priced if row.metric == metric]


@dataclass(frozen=True)
class GroupErrors:
    """Errors of some rows: relative to what was measured."""

    name: str
    rows: int
    stated: int
    """Rows that leave no setting open."""
    bias: float
    """Median error with its sign; negative if predictions are too small."""
    median: float
    """Median size of the errors."""
    worst: float
    """Largest error with its sign."""
    worst_line: int


def audit(path: Path, on_progress: Callable[[int, int], None] | None = None) -> Audit:
    """Predict every row of a table; raises :class:`partool.replay.table.RunTableError`.

    ``on_progress`` is called with the number of rows that are done, and of all rows.
    """
    table = read_table(path)
    result = Audit(str(path), len(table.lines), ignored=table.ignored)
    _take(table, result, on_progress)
    return result


def _take(table: RunTable, result: Audit, on_progress: Callable[[int, int], None] | None) -> None:
    for count, line in enumerate(table.lines):
        if on_progress is not None:
            on_progress(count, len(table.lines))
        if line.fault:
            result.unread.append(Unread(line.number, line.fault))
            continue
        try:
            case = case_of(line.cells)
        except SkipError as reason:
            result.unread.append(Unread(line.number, str(reason)))
            continue
        if not _compare(result, line.number, case):
            result.unread.append(Unread(line.number, f"nothing was measured: {_lacking(line.cells)}"))


def _lacking(cells: Cells) -> str:
    """Return why a row has neither a time nor a peak of memory."""
    partial = partial_peak(cells)
    if partial and (cells.number("peak_mem_value") or cells.number("peak_mem_gib")):
        return f"its memory is no peak: {partial}"
    return f"{', '.join(MEASURES[:-1])} are blank"


def _compare(result: Audit, line: int, case: RunCase) -> bool:
    """Add what a row measured; return False if it measured nothing."""
    time, memory = time_result(case), memory_result(case)
    if time is not None and time.measured:
        result.priced.append(PricedRow(line, "time", time, time.measured))
    if memory is not None and memory.measured:
        result.priced.append(PricedRow(line, "memory", memory, memory.measured))
    if memory is not None and not memory.fits:
        result.out_of_memory.append(OutOfMemory(line, memory.verdict))
    return time is not None or memory is not None


def summaries(rows: Iterable[PricedRow], group: Group) -> list[GroupErrors]:
    """Return the errors of rows by group, groups with most rows first; a row is in the group of each mechanism."""
    groups: dict[str, list[PricedRow]] = {}
    for row in rows:
        names = {"source": (row.source,), "stack": (f"{row.stack} on {row.accelerator}",), "mechanism": row.mechanisms}
        for name in names[group]:
            groups.setdefault(name, []).append(row)
    return sorted((summary(name, each) for name, each in groups.items()), key=lambda one: (-one.rows, one.name))


def summary(name: str, rows: list[PricedRow]) -> GroupErrors:
    """Return the errors of some rows, at least one."""
    worst = max(rows, key=lambda row: abs(row.error))
    return GroupErrors(
        name,
        len(rows),
        sum(not row.open for row in rows),
        median(row.error for row in rows),
        median(abs(row.error) for row in rows),
        worst.error,
        worst.line,
    )

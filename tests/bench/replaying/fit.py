"""Constants of code bases, fitted to published step times on some sources and judged on the others.

A constant is a field of :class:`partool.work.stack.Stack`. It is fitted by coordinate search: each constant in turn
takes the value of its range with the smallest loss, while the others stay. The loss is the mean over sources of the
median size of the logarithm of predicted over measured, so that a source with a thousand rows counts as one with five.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from math import exp, log
from pathlib import Path
from statistics import fmean, median

from partool.cost.training.predict import predict_time
from partool.plan.layout import Layout
from partool.replay import measured
from partool.replay.cases import SkipError, case_of
from partool.replay.predicted import plausible
from partool.replay.table import read_table
from partool.work.stack import Stack
from partool.work.stacks import STACKS
from partool.work.training import TrainingWork

Values = Mapping["Constant", float]


@dataclass(frozen=True)
class Constant:
    """A number that some code bases share."""

    stacks: tuple[str, ...]
    """Names in :data:`partool.work.stacks.STACKS`."""
    field: str
    low: float
    high: float

    @property
    def name(self) -> str:
        """The constant as the command writes it."""
        return f"{','.join(self.stacks)}.{self.field}"

    @property
    def shipped(self) -> float:
        """Value of the first code base today."""
        return float(getattr(STACKS[self.stacks[0]], self.field))

    def steps(self, centre: float, width: float, number: int) -> Iterator[float]:
        """Yield values around a centre, in a share ``width`` of the range."""
        half = 0.5 * width * (self.high - self.low)
        start, stop = max(self.low, centre - half), min(self.high, centre + half)
        for index in range(number):
            yield round(start + (stop - start) * index / max(number - 1, 1), 6)


def constant_of(text: str) -> Constant:
    """Read ``STACK[,STACK].FIELD=LOW:HIGH``; raises ValueError that says what is wrong."""
    name, _, bounds = text.partition("=")
    stacks, _, field_name = name.rpartition(".")
    names = tuple(stacks.split(","))
    if unknown := [one for one in names if one not in STACKS]:
        raise ValueError(f"{text}: no stack {unknown[0]!r}; write one of {', '.join(STACKS)}")
    numbers = [one.name for one in fields(Stack) if one.type == "float"]
    if field_name not in numbers:
        raise ValueError(f"{text}: no number {field_name!r} in a stack; write one of {', '.join(numbers)}")
    try:
        low, high = (float(bound) for bound in bounds.split(":"))
    except ValueError:
        raise ValueError(f"{text}: write the range as LOW:HIGH, such as 0:8") from None
    if not low < high:
        raise ValueError(f"{text}: the range is empty")
    today = {getattr(STACKS[one], field_name) for one in names}
    if len(today) > 1:
        raise ValueError(f"{text}: today these stacks have several values, {sorted(today)}; fit each by itself")
    return Constant(names, field_name, low, high)


@dataclass(frozen=True)
class TimedRow:
    """A row with its plausible readings."""

    number: int
    source: str
    stack: str
    """Name of the code base without what the source says otherwise (``deepspeed`` of ``deepspeed+fused-loss``)."""
    readings: tuple[tuple[TrainingWork, Layout, float], ...]
    """Work, layout, and measured seconds of the step."""


def timed_rows(path: Path, most: int, seed: int) -> list[TimedRow]:
    """Return the rows with a step time; of sources with more than ``most``, as many drawn by ``seed``."""
    lines = [line for line in read_table(path).lines if not line.fault]
    by: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        by.setdefault(line.cells.text("source"), []).append(index)
    drawn = random.Random(seed)
    picks = [sorted(drawn.sample(each, most)) if len(each) > most else each for each in by.values()]
    return [
        row for index in sorted(chain.from_iterable(picks)) if (row := _timed(index, lines[index].cells)) is not None
    ]


def _timed(number: int, cells: measured.Cells) -> TimedRow | None:
    try:
        case = case_of(cells)
    except SkipError:
        return None
    readings = [(job, layout, measured.step_s(cells, job, layout)) for job, layout in plausible(case)]
    timed = tuple((job, layout, seconds) for job, layout, seconds in readings if seconds)
    return TimedRow(number, case.source, timed[0][0].stack.name.split("+")[0], timed) if timed else None


@dataclass
class Prices:
    """Errors of rows at given constants; each row is priced once per set of the constants that it has."""

    rows: list[TimedRow]
    known: dict[tuple[int, tuple[tuple[str, float], ...]], float] = field(default_factory=dict)

    def log_error(self, row: TimedRow, values: Values) -> float:
        """Return the logarithm of predicted over measured seconds."""
        changes = tuple(sorted((one.field, value) for one, value in values.items() if row.stack in one.stacks))
        key = (row.number, changes)
        if key not in self.known:
            self.known[key] = min(_priced(row.stack, reading, changes) for reading in row.readings)[1]
        return self.known[key]

    def by_source(self, values: Values, without: Collection[str] = ()) -> dict[str, list[float]]:
        """Return the errors of each source that is not left out."""
        errors: dict[str, list[float]] = {}
        for row in self.rows:
            if row.source not in without:
                errors.setdefault(row.source, []).append(self.log_error(row, values))
        return errors

    def loss(self, values: Values, without: Collection[str] = ()) -> float:
        """Return the mean over sources of the median size of the errors."""
        return fmean(median(map(abs, errors)) for errors in self.by_source(values, without).values())

    def sources(self, constant: Constant) -> tuple[str, ...]:
        """Return the sources with rows that a constant may change."""
        return tuple(sorted({row.source for row in self.rows if row.stack in constant.stacks}))


def _priced(
    name: str, reading: tuple[TrainingWork, Layout, float], changes: Iterable[tuple[str, float]]
) -> tuple[float, float]:
    """Return the predicted seconds per sequence and the error of one reading."""
    job, layout, seconds = reading
    # What a row says of itself, such as asynchronous tensor parallelism, stays as it says.
    usual = {
        name: value for name, value in changes if getattr(job.stack, name) == getattr(STACKS[stack_name(job)], name)
    }
    changed = replace(job, stack=replace(job.stack, **usual))  # type: ignore[arg-type]
    predicted = predict_time(changed, layout, 1).step_time_s
    return predicted / job.global_batch, log(predicted / seconds)


def stack_name(job: TrainingWork) -> str:
    """Return the name of the code base without what the source says otherwise."""
    return job.stack.name.split("+")[0]


@dataclass(frozen=True)
class Search:
    """How constants are searched for."""

    rounds: int = 2
    """Times that each constant is searched for, in half the range of the time before."""
    steps: int = 7
    """Values tried each time."""
    gain: float = 0.001
    """Least decrease of the loss for which a constant changes."""


def fitted(
    prices: Prices,
    constants: Iterable[Constant],
    search: Search,
    without: Collection[str] = (),
    others: Values | None = None,
) -> dict[Constant, float]:
    """Return the constants with the smallest loss on the sources that are not left out, and ``others`` as they are.

    A constant that only rows of left-out sources have keeps its value.
    """
    free = list(constants)
    values = {**(others or {}), **{one: one.shipped for one in free}}
    best = prices.loss(values, without)
    for turn in range(search.rounds):
        for one in free:
            if not set(prices.sources(one)) - set(without):
                continue
            centre, width = (0.5 * (one.low + one.high), 1.0) if turn == 0 else (values[one], 0.5**turn)
            for value in one.steps(centre, width, search.steps):
                loss = prices.loss({**values, one: value}, without)
                if loss < best - search.gain:
                    best, values[one] = loss, value
    return values


@dataclass(frozen=True)
class Judged:
    """Errors of a source with today's constants, with those fitted to all sources, and to all others."""

    source: str
    rows: int
    stacks: tuple[str, ...]
    shipped: tuple[float, float]
    """Median error and median size of the errors; relative to what was measured."""
    all_sources: tuple[float, float]
    left_out: tuple[float, float]


@dataclass(frozen=True)
class Refit:
    """Outcome of a refit."""

    values: dict[Constant, float]
    without: dict[str, dict[Constant, float]]
    """Constants by the source that was left out."""
    sources: list[Judged]


def refit(prices: Prices, constants: Collection[Constant], search: Search) -> Refit:
    """Fit constants to all sources, and with each source left out, on which they are then judged.

    With a source left out, only constants that its rows have are fitted anew, from today's values on.
    """
    shipped = {one: one.shipped for one in constants}
    values = fitted(prices, constants, search)
    without: dict[str, dict[Constant, float]] = {}
    judged: list[Judged] = []
    for source, errors in prices.by_source(shipped).items():
        touched = [one for one in constants if source in prices.sources(one)]
        others = {one: value for one, value in values.items() if one not in touched}
        without[source] = fitted(prices, touched, search, (source,), others)
        stacks = tuple(sorted({row.stack for row in prices.rows if row.source == source}))
        figures = [_figures(prices.by_source(each)[source]) for each in (shipped, values, without[source])]
        judged.append(Judged(source, len(errors), stacks, *figures))
    return Refit(values, without, judged)


def _figures(errors: list[float]) -> tuple[float, float]:
    """Return bias and median size of errors given as logarithms."""
    relative = [exp(error) - 1.0 for error in errors]
    return median(relative), median(map(abs, relative))

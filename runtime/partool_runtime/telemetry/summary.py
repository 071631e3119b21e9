"""Pure functions that compare the predicted and the measured value of each term."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict

from partool.plan.terms import HOST_TERMS, MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS
from partool.plan.types import Prediction

Section = Literal["memory", "host", "time", "traffic"]
NOT_MEASURED = "not measured"
TOTAL = "total"
SECTIONS: dict[Section, dict[str, str]] = {
    "memory": MEMORY_TERMS, "host": HOST_TERMS, "time": TIME_TERMS, "traffic": TRAFFIC_TERMS,
}  # fmt: skip
UNITS: dict[Section, str] = {"memory": "bytes", "host": "bytes", "time": "s", "traffic": "bytes"}
WITHOUT_TOTAL = ("host", "traffic")


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A measured value, in bytes or seconds, and the method of measurement."""

    value: float
    measure: str
    """Method of measurement: timer, counter, hook or resident memory; never a difference of other terms."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Everything measured on one rank, or combined over ranks; terms without a measurement are absent."""

    memory: dict[str, MeasuredValue] = field(default_factory=dict)
    time: dict[str, MeasuredValue] = field(default_factory=dict)
    traffic: dict[str, MeasuredValue] = field(default_factory=dict)
    host: dict[str, MeasuredValue] = field(default_factory=dict)

    def section(self, name: Section) -> dict[str, MeasuredValue]:
        """Return the measured values of a section by term, including ``total`` if it was measured directly."""
        return {"memory": self.memory, "host": self.host, "time": self.time, "traffic": self.traffic}[name]

    def merged(self, other: Measures) -> Measures:
        """Return the terms of ``self`` and ``other``; if both have a term, the value in ``other`` is taken."""
        return Measures(**{name: {**self.section(name), **other.section(name)} for name in SECTIONS})

    def to_json(self) -> dict[str, dict[str, dict[str, float | str]]]:
        """Return the measurements as nested dicts, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Measures:
        """Parse the result of :meth:`to_json`."""
        sections = {
            name: {term: MeasuredValue(float(m["value"]), str(m["measure"])) for term, m in value.get(name, {}).items()}
            for name in SECTIONS
        }
        return cls(**sections)


class RowJson(TypedDict):
    """A :class:`Row` as in ``summary.json``."""

    section: Section
    term: str
    predicted: float | None
    measured: float | None
    measure: str
    unit: str
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of predicted and measured values."""

    section: Section
    term: str
    predicted: float | None
    measured: float | None
    measure: str
    """``not measured`` if and only if ``measured`` is None."""

    @property
    def ratio(self) -> float | None:
        """Measured value divided by predicted value; None if a value is missing or the predicted value is 0."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


def combine(ranks: Sequence[Measures], *, busiest: bool = False) -> Measures:
    """Return each term's value over all ranks: the largest for memory and traffic, the median for time.

    With ``busiest``, times come from the rank with the longest computation, as in predictions for pipelines, whose
    ranks have different work.
    """
    rules: dict[Section, Callable[[list[float]], float]] = {
        "memory": max, "host": max, "time": statistics.median, "traffic": max,
    }  # fmt: skip
    combined: dict[str, dict[str, MeasuredValue]] = {}
    for name in SECTIONS:
        terms = sorted({term for rank in ranks for term in rank.section(name)})
        values = {term: [r.section(name)[term] for r in ranks if term in r.section(name)] for term in terms}
        combined[name] = {
            term: MeasuredValue(float(rules[name]([m.value for m in each])), each[0].measure)
            for term, each in values.items()
        }
    if busiest and ranks:
        combined["time"] |= max(ranks, key=_compute_s).time
    return Measures(**combined)


def _compute_s(rank: Measures) -> float:
    return sum(rank.time[term].value for term in ("forward", "backward") if term in rank.time)


def rows(prediction: Prediction, measures: Measures) -> list[Row]:
    """Return a row for every known term of a prediction and for the totals, whether measured or not."""
    predicted: dict[Section, dict[str, float]] = {
        "memory": {**prediction.memory.terms_bytes, TOTAL: prediction.memory.total_bytes},
        "host": {term: float(value) for term, value in prediction.memory.host_terms_bytes.items()},
        "time": {**prediction.time.terms_s, TOTAL: prediction.time.step_time_s},
        "traffic": {key: float(value) for key, value in prediction.time.traffic_bytes.items()},
    }
    table = []
    for name, terms in SECTIONS.items():
        names = [*terms] if name in WITHOUT_TOTAL else [*terms, TOTAL]
        for term in names:
            measured = measures.section(name).get(term)
            value, how = (None, NOT_MEASURED) if measured is None else (measured.value, measured.measure)
            table.append(Row(name, term, predicted[name].get(term), value, how))
    return table


def row_json(row: Row) -> RowJson:
    """Return a row as in ``summary.json``."""
    return {
        "section": row.section, "term": row.term, "predicted": row.predicted, "measured": row.measured,
        "measure": row.measure, "unit": UNITS[row.section], "ratio": row.ratio,
    }  # fmt: skip


def median_terms(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each term over the steps that have it."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for term, seconds in step.items():
            values.setdefault(term, []).append(seconds)
    return {term: statistics.median(each) for term, each in values.items()}


def mfu(model_flops: float, step_time_s: float, peak_flops: float | None, world_size: int) -> float | None:
    """Return model FLOPs utilisation (Chowdhery et al., arXiv 2204.02311, appendix B); None without a known peak.

    ``model_flops`` counts one step over all ranks, without recomputation; ``peak_flops`` is the peak of one rank.
    """
    if peak_flops is None or step_time_s <= 0:
        return None
    return model_flops / (step_time_s * peak_flops * world_size)

"""Predicted against measured: pure functions."""

from __future__ import annotations

import io
import json

import pytest
from _telemetry import prediction
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from partool.plan.terms import MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS
from partool_runtime.telemetry import _figures, summary
from partool_runtime.telemetry._closing import closing_table
from partool_runtime.telemetry.summary import NOT_MEASURED, TOTAL, MeasuredValue, Measures

VALUES = st.floats(min_value=0, max_value=1e12)
MEASURE = st.builds(MeasuredValue, VALUES, st.sampled_from(["timer", "collective counter", "counted tensors"]))
MEASURES = st.builds(
    Measures,
    st.dictionaries(st.sampled_from([*MEMORY_TERMS, TOTAL]), MEASURE),
    st.dictionaries(st.sampled_from([*TIME_TERMS, TOTAL]), MEASURE),
    st.dictionaries(st.sampled_from([*TRAFFIC_TERMS]), MEASURE),
)


@given(MEASURES)
def test_every_term_has_a_row_with_its_own_measure_or_not_measured(measures: Measures) -> None:
    table = summary.rows(prediction(), measures)
    names = {(row.section, row.term) for row in table}
    assert names >= {(s, t) for s, terms in summary.SECTIONS.items() for t in terms}
    for row in table:
        own = measures.section(row.section).get(row.term)
        if own is None:
            assert (row.measured, row.measure, row.ratio) == (None, NOT_MEASURED, None)
        else:
            assert (row.measured, row.measure) == (own.value, own.measure)


def test_ratio_is_measured_over_predicted() -> None:
    measures = Measures(time={"forward": MeasuredValue(0.025, "timer")})
    (row,) = [r for r in summary.rows(prediction(), measures) if (r.section, r.term) == ("time", "forward")]
    assert row.ratio == pytest.approx(2.5)
    free = prediction(terms_s={"forward": 0.0})
    (row,) = [r for r in summary.rows(free, measures) if (r.section, r.term) == ("time", "forward")]
    assert row.ratio is None


def test_ranks_combine_by_largest_memory_and_traffic_and_median_time() -> None:
    ranks = [
        Measures(
            {"total": MeasuredValue(m, "m")},
            {"forward": MeasuredValue(t, "t")},
            {"gradient_sync": MeasuredValue(b, "c")},
        )
        for m, t, b in [(10, 1.0, 5), (30, 4.0, 7), (20, 2.0, 6)]
    ]
    both = summary.combine([*ranks, Measures(memory={"optimizer": MeasuredValue(1, "x")})])
    assert both.memory == {"total": MeasuredValue(30, "m"), "optimizer": MeasuredValue(1, "x")}
    assert both.time == {"forward": MeasuredValue(2.0, "t")}
    assert both.traffic == {"gradient_sync": MeasuredValue(7, "c")}


@given(MEASURES)
def test_measures_survive_json(measures: Measures) -> None:
    assert Measures.from_json(json.loads(json.dumps(measures.to_json()))) == measures


def test_mfu_by_hand() -> None:
    # 6 · 10^9 parameters · 10^4 tokens = 6e13 FLOP; 2 s on 3 devices of 50 TFLOP/s could do 3e14.
    assert summary.mfu(6e13, 2.0, 50e12, 3) == pytest.approx(0.2)
    assert summary.mfu(6e13, 2.0, None, 3) is None


def test_median_of_terms_counts_only_steps_that_have_them() -> None:
    steps = [{"forward": 1.0}, {"forward": 9.0, "optimizer": 4.0}, {"forward": 2.0}]
    assert summary.median_terms(steps) == {"forward": 2.0, "optimizer": 4.0}
    assert summary.median_terms([]) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123 s"), (12.34, "12.3 s"), (1.5, "1.50 s"), (0.0243, "24.3 ms"), (18e-5, "180 µs"), (0.0, "0.00 µs")],
)
def test_seconds(value: float, text: str) -> None:
    assert _figures.seconds(value) == text


def test_durations_and_sizes() -> None:
    assert [_figures.duration(v) for v in (-1, 59.4, 185, 7620, 442800)] == ["0s", "59s", "3m05s", "2h07m", "5d03h"]
    assert [_figures.size(v) for v in (812, 1536, 3 << 19, 5 << 30)] == ["812 B", "1.50 KiB", "1.50 MiB", "5.00 GiB"]


def test_the_closing_table_leaves_out_what_does_not_occur() -> None:
    """Like the report, it omits terms neither predicted nor measured; a measured term predicted as 0 stays."""
    rows = [
        summary.Row("time", "forward", 1.0, 2.0, "timer"),
        summary.Row("time", "offload", 0.0, None, NOT_MEASURED),
        summary.Row("time", "expert", None, 0.0, "timer"),
        summary.Row("time", "optimizer", 0.5, None, NOT_MEASURED),
        summary.Row("time", "data", 0.0, 3.0, "timer"),
    ]
    console = Console(width=120, file=io.StringIO())
    console.print(closing_table(rows, ranks=1, world_size=1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.split()[0] for line in text.splitlines() if line.startswith("   ") and line.strip()]
    assert lines == ["forward", "optimizer", "data"]

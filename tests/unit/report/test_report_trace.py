"""Files for trace viewers: slices of a row never overlap and are labelled. Timelines and terms add up."""

from __future__ import annotations

import html
from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of
from rich.console import Console

from partool.plan.types import Plan
from partool.report.drawing import drawn
from partool.report.html import render_html
from partool.report.terminal_timeline import render_plan_timeline
from partool.report.timeline import bubble_words, planned
from partool.report.trace import plan_trace, process
from partool.report.units import seconds
from partool.schedule import StageTimes, generate, simulate

SPEC = """\
model: llama3-8b
hardware: {accelerator: h200, nodes: 1, per_node: 8}
data: {source: /no/such/tokens/*.bin}
training: {sequence_length: 8192, global_batch: 16, steps: 100}
parallel: {micro_batch: 1, sequence: 1, tensor: 1, pipeline: PIPELINE}
"""
SECONDS = st.floats(1e-7, 2.0, allow_nan=False)


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return {row: sorted(found, key=lambda event: event["ts"]) for row, found in rows.items()}


def overlaps(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of slices in which the second begins before the first has ended, in whole nanoseconds."""
    found = []
    for row in slices(events).values():
        for one, other in pairwise(row):
            if round(1e3 * (one["ts"] + one["dur"])) > round(1e3 * other["ts"]):
                found.append((one["name"], other["name"]))
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(["1f1b", "zb-h1", "hanayo", "weipipe"]), st.lists(SECONDS, min_size=12, max_size=12), SECONDS)
def test_slices_never_overlap(name: str, took: list[float], send_s: float) -> None:
    schedule = generate(name, 2, 4, 2 if name == "hanayo" else 1)
    n = schedule.stages
    times = StageTimes(
        took[:n], [0.0 + a + b for a, b in zip(took[4:], took[8:], strict=False)][:n], took[8 : 8 + n], send_s
    )
    drawing = drawn(schedule, simulate(schedule, times))
    events = process(drawing, "x", 0)
    assert overlaps(events) == []
    for event in events:
        assert event.get("dur", 0.0) >= 0.0
    ends = max(event["ts"] + event["dur"] for row in slices(events).values() for event in row)
    assert ends / 1e6 < drawing.span_s + 2e-9
    assert (
        name == "weipipe" or ends / 1e6 > drawing.span_s - 2e-9
    )  # there gradients return to their owners after the last pass


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(SECONDS, min_size=9, max_size=9))
def test_terms_never_overlap(took: list[float]) -> None:
    plan = made("1f1b")
    time = plan.prediction.time
    names = [name for name, value in time.terms_s.items() if value > 0.0] or [*time.terms_s]
    terms = {**time.terms_s, **dict(zip(names, took, strict=False))}
    prediction = plan.prediction.model_copy(update={"time": time.model_copy(update={"terms_s": terms})})
    events = plan_trace(plan.model_copy(update={"prediction": prediction}))["traceEvents"]
    assert len(slices(events)[1, 0]) > 3
    assert overlaps(events) == []


PIPELINES = {"1f1b": "{stages: 4, schedule: 1f1b}", "hanayo": "{stages: 4, schedule: hanayo}", "none": "1"}


@cache
def made(name: str) -> Plan:
    return plan_of(SPEC.replace("PIPELINE", PIPELINES[name]))


def test_names_and_titles() -> None:
    """Stages are named if a rank has several; a plan without a pipeline has no schedule."""
    named = {}
    for name in PIPELINES:
        plan = made(name)
        events = plan_trace(plan)["traceEvents"]
        title = next(event["args"]["name"] for event in events if event["name"] == "process_name")
        named[name] = (title.partition(": ")[2], {event["name"] for event in slices(events)[0, 0]})
    assert named["1f1b"][0] == "pipeline (1f1b)"
    assert {"F0", "B0"} <= named["1f1b"][1]
    assert named["hanayo"][0] == "pipeline (hanayo)"
    assert {"0F0", "7F0", "7B0"} <= named["hanayo"][1]
    assert named["none"][0] == "forward and backward passes"


CPU = """\
model: {layers: 16, hidden: 128, ffn_hidden: 384, heads: 4, kv_heads: 2, vocab: 256, max_position: 128}
hardware: {accelerator: cpu, per_node: PER_NODE}
training: {sequence_length: 128, global_batch: 16, steps: 100, precision: fp32}
data: python-stdlib
parallel: {pipeline: {stages: 2, schedule: 1f1b}, micro_batch: 2}
"""


def test_the_term_of_the_plan_and_its_timeline_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """On shared cores the term counts waits that the timeline omits: both say so, with figures that add up."""
    shared, spread, own = plan_of(CPU.replace("PER_NODE", "2")), plan_of(CPU.replace("PER_NODE", "4")), made("1f1b")
    for plan, waits in ((shared, True), (spread, False), (own, False)):
        drawing = planned(plan, 10**6)
        words = bubble_words(plan, drawing)
        idle_s = drawing.span_s - max(drawing.busy_s)
        term_s = plan.prediction.time.terms_s["pipeline_bubble"]
        assert f"pipeline_bubble, {seconds(term_s)}," in words
        assert ("share cores" in words) == waits
        if waits:
            assert term_s > 1.05 * idle_s
            assert f"{seconds(idle_s)}, and {seconds(term_s - idle_s)} that it waits" in words
        else:
            assert term_s == pytest.approx(idle_s, rel=1e-6)
        assert words in html.unescape(render_html(plan))
        render_plan_timeline(plan, Console(width=400))
        assert (words in capsys.readouterr().out) == waits

"""The HTML report and the trace: well-formed, escaped, and with the plan's figures."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from layouts import laid
from often import often
from planned import plan_of

from partool.cli.main import run
from partool.plan.terms import TIME_TERMS
from partool.plan.types import Plan
from partool.report.html import render_html
from partool.report.html_svg import log_ticks, tick_label, ticks
from partool.report.timeline import planned
from partool.report.trace import plan_trace
from partool.report.units import bars as error_bars
from partool.report.units import gib, seconds

SPEC = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}
data: {source: /no/such/tokens/*.bin}
training: {sequence_length: 8192, global_batch: 64, steps: 10000}
parallel: {pipeline: {stages: 4, schedule: SCHEDULE}}
"""
VOID = {"meta", "link", "br", "input", "img", "hr"}
SECTIONS = {"headline", "why", "mesh", "memory", "time", "timeline", "candidates", "inputs"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(SPEC.replace("SCHEDULE", "1f1b"))


class Page(HTMLParser):
    """Parser of a page; fails on elements that are not closed in order, and on duplicate ids."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def test_the_page_is_well_formed_and_holds_every_section(plan: Plan) -> None:
    page = Page(render_html(plan))
    assert set(page.ids) >= SECTIONS
    for svg in page.of("svg"):
        assert svg["role"] == "img"
        assert set((svg["aria-labelledby"] or "").split()) <= set(page.ids)
    assert all("scope" in head for head in page.of("th"))


def test_the_page_needs_no_network(plan: Plan) -> None:
    source = render_html(plan)
    page = Page(source)
    policy = next(meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert not [a for _, a in page.elements if "src" in a or (a.get("href") or "data:")[:5] != "data:"]
    assert "url(" not in source
    assert "@import" not in source


def test_figures_are_the_plans(plan: Plan) -> None:
    source = render_html(plan)
    words = " ".join(Page(source).words)
    time, memory = plan.prediction.time, plan.prediction.memory
    assert f'<b id="step-time">{seconds(time.step_time_s)}</b>' in source
    assert f"{gib(memory.total_bytes)} of {gib(plan.devices.memory_bytes)} GiB" in words
    assert f"per step, {error_bars(plan.prediction)}" in words
    assert len(plan.answers) >= 4
    for answer in plan.answers:
        assert f"{answer.question} {answer.text}" in words
    for name, value in time.terms_s.items():
        assert (f'</i>{name}</th><td class="n">{seconds(value)}</td>' in source) == (value > 0)
    for row in plan.candidates:
        assert f'data-v="{row.step_time_s}"' in source
        assert row.summary in words
    assert plan.hash in words
    roles = [other.role for other in plan.alternatives if other.role]
    assert roles
    assert all(f"<b>{role}:</b>" in source for role in roles)


def bars(source: str, identifier: str) -> list[float]:
    svg = source[source.index(f'<svg id="{identifier}"') :]
    page = Page(svg[: svg.index("</svg>") + 6])
    return [float(rect["width"] or 0) for rect in page.of("rect")]


def test_bars_are_as_wide_as_their_figures(plan: Plan) -> None:
    source = render_html(plan)
    time, memory = plan.prediction.time, plan.prediction.memory
    terms = [time.terms_s[name] for name in TIME_TERMS if time.terms_s[name] > 0]
    assert bars(source, "time-terms") == pytest.approx([1000 * v / time.step_time_s for v in terms], abs=0.01)
    totals = [sum(bars(source, f"memory-{rank.pipeline_rank}")) for rank in memory.ranks]
    assert len(totals) == 4
    scale = totals[0] / memory.ranks[0].total_bytes
    assert totals == pytest.approx([scale * rank.total_bytes for rank in memory.ranks], abs=0.1)


HOSTILE = '"><script>alert(1)</script><svg onload=x>{{ 7*7 }}'


def test_hostile_text_stays_text(plan: Plan) -> None:
    rows = [row.model_copy(update={"summary": HOSTILE, "why_not": row.why_not and HOSTILE}) for row in plan.candidates]
    others = [other.model_copy(update={"summary": HOSTILE, "change": HOSTILE}) for other in plan.alternatives]
    bad = plan.model_copy(
        update={
            "name": HOSTILE,
            "model_source": HOSTILE,
            "limit": HOSTILE,
            "reasons": (HOSTILE,),
            "candidates": tuple(rows),
            "alternatives": tuple(others),
            "devices": plan.devices.model_copy(update={"accelerator": HOSTILE}),
            "inputs": {HOSTILE: HOSTILE},
            "spec": {HOSTILE: [HOSTILE]},
            "findings": tuple(f.model_copy(update={"message": HOSTILE}) for f in plan.findings),
        }
    )
    source = render_html(bad, source=[HOSTILE])
    page = Page(source)
    assert len(page.of("script")) == 1
    assert not [a for _, a in page.elements if any(key.startswith("on") for key in a)]
    assert HOSTILE in page.words
    assert page.words.count(HOSTILE) >= 8
    assert "<script>alert" not in source
    assert plan_trace(bad)["otherData"]["plan"] == HOSTILE


def trace_rows(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 0:
            rows.setdefault(event["tid"], []).append(event)
    return rows


def test_the_trace_holds_every_action_once_and_none_overlap(plan: Plan) -> None:
    trace = json.loads(json.dumps(plan_trace(plan)))
    rows, m = trace_rows(trace), plan.layout.derived.accumulation
    assert sorted(rows) == [0, 1, 2, 3]
    for rank, events in rows.items():
        seen = {(event["cat"], event["args"]["micro_batch"]) for event in events}
        assert len(seen) == len(events) == 2 * m
        assert {event["args"]["stage"] for event in events} == {rank}
        ends = [event["ts"] + event["dur"] for event in events]
        assert all(later["ts"] >= end - 0.01 for end, later in zip(ends, events[1:], strict=False))
    last = max(event["ts"] + event["dur"] for events in rows.values() for event in events)
    assert last == pytest.approx(1e6 * planned(plan, 10**6).span_s, rel=1e-6)
    terms = [event["dur"] for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert sum(terms) == pytest.approx(1e6 * plan.prediction.time.step_time_s, rel=1e-6)


@pytest.mark.parametrize("name", often(["1f1b", "zb-h1", "gpipe", "interleaved"], ["zb-h1"]))
def test_a_shortened_schedule_keeps_its_span_and_its_order(name: str) -> None:
    plan = plan_of(SPEC.replace("SCHEDULE", name).replace("global_batch: 64", "global_batch: 768"))
    whole, short = planned(plan, 10**6), planned(plan, 100)
    assert whole.left_out is None
    assert short.left_out is not None
    assert short.left_out.micro_batches == 180
    assert (short.micro_batches, short.in_flight) == (whole.micro_batches, whole.in_flight)
    assert short.span_s == pytest.approx(whole.span_s, rel=5e-3)
    assert short.bubble == pytest.approx(whole.bubble, abs=6e-3)
    for rank in range(4):
        first = [next(box.action for box in found.boxes if box.rank == rank) for found in (short, whole)]
        last = [[box.action for box in found.boxes if box.rank == rank][-1] for found in (short, whole)]
        assert first[0] == first[1]
        assert last[0] == last[1]
    ends = [max(box.stop_s for box in found.boxes if box.rank == 0) for found in (short, whole)]
    assert ends[0] == pytest.approx(ends[1], rel=5e-3)
    middle = [box for box in short.boxes if short.left_out.from_s < box.start_s < short.left_out.to_s]
    assert middle == []
    assert len(render_html(plan)) < 600_000


PIPELINES = {
    "hanayo": "{stages: 4, schedule: hanayo, waves: 2}",
    "zb-v": "{stages: 4, schedule: zb-v}",
    "gpipe": "{stages: 4, schedule: gpipe}",
}


@pytest.mark.parametrize("name", often(PIPELINES, ["hanayo", "gpipe"]))
def test_every_kind_of_schedule_is_drawn(name: str) -> None:
    plan = plan_of(SPEC.replace("{stages: 4, schedule: SCHEDULE}", PIPELINES[name]))
    drawing = planned(plan, 10**6)
    assert len(drawing.boxes) == plan.layout.derived.accumulation * len(plan.layout.pipeline.bounds) * (
        3 if name == "zb-v" else 2
    )
    source = render_html(plan)
    page = Page(source)
    assert f"Schedule {name}: {seconds(drawing.span_s)}" in " ".join(page.words)
    drawn = {attributes["class"] for attributes in page.of("rect") if (attributes.get("class") or "")[:1] == "a"}
    kinds = "FIW" if name == "zb-v" else "FB"
    pale = [""] if name == "gpipe" else ["", " odd"]
    assert drawn == {f"a{kind}{odd}" for kind in kinds for odd in pale}
    assert ("pale: every second stage" in source) == (name != "gpipe")
    trace = plan_trace(plan)
    assert {row: len(events) for row, events in trace_rows(trace).items()} == dict.fromkeys(
        range(4), len(drawing.boxes) // 4
    )
    arrows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert len(arrows) == 2 * len(drawing.transfers) > 0


def test_plans_without_a_pipeline_or_candidates_or_ranks(plan: Plan) -> None:
    flat = plan_of(SPEC.replace("{pipeline: {stages: 4, schedule: SCHEDULE}}", "{pipeline: 1}"))
    assert "No pipeline" in render_html(flat)
    memory = plan.prediction.memory.model_copy(update={"ranks": ()})
    prediction = plan.prediction.model_copy(update={"memory": memory})
    bare = plan.model_copy(update={"prediction": prediction, "candidates": (), "search": None, "alternatives": ()})
    source = render_html(bare)
    Page(source)
    assert len(bars(source, "memory-0")) == sum(size > 0 for size in memory.terms_bytes.values())
    assert "no other priced layouts" in source


def test_a_schedule_that_cannot_be_made_is_a_note(plan: Plan) -> None:
    layout = laid(plan.layout, stages=plan.layout.pipeline.bounds[:-1])
    assert "cannot be drawn: 3 stages do not fill 4 ranks" in render_html(plan.model_copy(update={"layout": layout}))


def test_large_plans_stay_small_pages(plan: Plan) -> None:
    mesh = plan.layout.mesh._replace(dp_shard=4096)
    layout = laid(plan.layout, mesh=mesh)
    devices = plan.devices.model_copy(update={"nodes": 2048})
    rank = plan.prediction.memory.ranks[0]
    ranks = tuple(rank.model_copy(update={"pipeline_rank": index}) for index in range(64))
    memory = plan.prediction.memory.model_copy(update={"ranks": ranks})
    prediction = plan.prediction.model_copy(update={"memory": memory})
    large = plan.model_copy(
        update={"layout": layout, "devices": devices, "prediction": prediction, "candidates": plan.candidates * 10}
    )
    source = render_html(large)
    Page(source)
    assert len(source) < 600_000
    assert "2032 more nodes" in source
    assert source.count('<svg id="memory-') == 20


def test_ticks() -> None:
    assert ticks(0.0, 1.0, 6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(31.2, 32.1, 5) == pytest.approx([31.5, 32.0])
    assert ticks(3.0, 3.0) == [3.0]
    assert log_ticks(25.0, 120.0) == pytest.approx([30, 40, 50, 70, 100])
    assert log_ticks(4.0, 60.0) == pytest.approx([5, 10, 20, 50])
    assert [tick_label(v) for v in (0.25, 40.0, 1500.0)] == ["0.25", "40", "1,500"]


def partool(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_file, page, trace = tmp_path / "p.json", tmp_path / "deep" / "r.html", tmp_path / "t.json"
    plan_file.write_text(plan_of(SPEC.replace("SCHEDULE", "zb-h1")).to_json())
    assert partool("plan", plan_file, "--html", page, "--timeline", trace) == 0
    assert "<!doctype html>" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    capsys.readouterr()
    assert partool("plan", plan_file, "--html", "/dev/null/r.html") == 3
    assert "PT002" in capsys.readouterr().err

"""The HTML report in a real headless browser: no console messages, all figures shown, sorting, narrow screens."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from _histories import BEGAN, start, steps, write_log
from layouts import laid
from patience import PATIENCE

from partool.plan.event_log import event_log
from partool.plan.pipeline_log import Executed, pipeline_data
from partool.plan.terms import TIME_TERMS
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.report.compare import compared_run
from partool.report.curves import read_history
from partool.report.executed import compare
from partool.report.headline import headline
from partool.report.html import render_html
from partool.report.html_compare import render_compare_html
from partool.report.html_run import render_run_html
from partool.report.run import RunSummary
from partool.report.timeline import planned
from partool.spec import load_text

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser found ({', '.join(NAMES)}); .ci/run installs one")
DARK, LIGHT = 0, 1
SPEC = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}
data: {source: /no/such/tokens/*.bin}
training: {sequence_length: 8192, global_batch: 64, steps: 10000}
parallel: {pipeline: {stages: 8, schedule: 1f1b}}
"""
# Runs in the page after its own script: collects the visible content and the effect of a click on a heading.
PROBE = """
const wide = (node) => node.getBoundingClientRect().width;
const all = (selector) => [...document.querySelectorAll(selector)];
const column = () => all("#candidate-table tbody tr").map((row) => Number(row.cells[2].dataset.v));
const before = column();
const head = document.querySelectorAll("#candidate-table thead th")[2];
head.querySelector("button").click();
const up = column(), sortUp = head.getAttribute("aria-sort");
head.querySelector("button").click();
const down = column();
const inside = all("svg.timeline g.event text").filter((text) => {
  const [a, b] = [text.getBoundingClientRect(), text.parentNode.querySelector("rect").getBoundingClientRect()];
  return a.left < b.left - .5 || a.right > b.right + .5;
}).length;
const shape = document.querySelector("#time-terms rect");
shape.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
const tip = document.getElementById("tip");
const seen = {
  sections: all("header, section").filter((node) => node.offsetHeight > 60).map((node) => node.id),
  window: window.innerWidth,
  terms: all("#time-terms rect").map(wide),
  ranks: all("#memory svg.bar").map((bar) => [...bar.querySelectorAll("rect")].map(wide)),
  before, up, down, sortUp, inside,
  tip: tip.hidden ? "" : tip.textContent,
  resources: performance.getEntriesByType("resource").map((entry) => entry.name),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  small: all("td, th, p, li, dd, dt, span, code, svg text")
    .filter((node) => node.checkVisibility() && parseFloat(getComputedStyle(node).fontSize) < 11).length,
  page: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
};
const result = document.createElement("pre");
result.id = "probe";
result.textContent = JSON.stringify(seen);
document.body.append(result);
"""


def browse(page: Path, *options: str, scheme: int = LIGHT) -> tuple[str, list[str]]:
    """Open a page; return the browser's output and the page's console messages."""
    assert BROWSER is not None
    profile = page.parent / f"profile-{page.stem}"
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--no-first-run", "--disable-extensions", "--disable-background-networking", f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0",
        f"--blink-settings=preferredColorScheme={scheme}", *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90 * PATIENCE, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def framed(source: str, width: int) -> str:
    """Return a page that shows another in a frame and repeats its probe's result: windows cannot be very narrow."""
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{html.escape(source)}"></iframe>'
    repeat = "document.body.append(document.querySelector('iframe').contentDocument.getElementById('probe'))"
    return f"<!doctype html><body>{frame}<script>addEventListener('load', () => {repeat})</script></body>"


def probe(source: str, folder: Path, scheme: int = LIGHT, width: int = 1280, script: str = PROBE) -> dict[str, Any]:
    """Return the probe's result in a page that must load without console messages."""
    page = folder / f"page-{scheme}-{width}.html"
    page.write_text(framed(source.replace("</body>", f"<script>{{{script}}}</script></body>"), width), encoding="utf-8")
    dom, console = browse(page, "--dump-dom", "--window-size=1400,900", scheme=scheme)
    assert console == []
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.fixture(scope="module")
def plan() -> Plan:
    loaded = load_text(SPEC)
    assert loaded.spec is not None, loaded
    made = make_plan(loaded.spec, base_dir=Path("/"), default_name="example").plan
    assert made is not None
    return made


@pytest.fixture(scope="module")
def light(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe(render_html(plan), tmp_path_factory.mktemp("light"))


def test_every_section_is_seen_and_nothing_is_fetched(light: dict[str, Any]) -> None:
    assert light["sections"] == ["headline", "why", "mesh", "memory", "time", "timeline", "candidates", "inputs"]
    assert light["resources"] == []
    assert light["small"] == 0


def test_bars_on_the_screen_are_as_wide_as_their_figures(plan: Plan, light: dict[str, Any]) -> None:
    time, memory = plan.prediction.time, plan.prediction.memory
    terms = [time.terms_s[name] for name in TIME_TERMS if time.terms_s[name] > 0]
    whole = sum(light["terms"])
    assert [width / whole for width in light["terms"]] == pytest.approx([v / time.step_time_s for v in terms], abs=2e-3)
    totals = [sum(widths) for widths in light["ranks"]]
    assert len(totals) == len(memory.ranks) == 8
    shares = [total / max(totals) for total in totals]
    most = max(rank.total_bytes for rank in memory.ranks)
    assert shares == pytest.approx([rank.total_bytes / most for rank in memory.ranks], abs=5e-3)


def test_labels_stand_inside_their_boxes_and_tips_appear(light: dict[str, Any]) -> None:
    assert light["inside"] == 0
    assert light["tip"].split()[0] in TIME_TERMS


def test_a_click_sorts_the_candidates(plan: Plan, light: dict[str, Any]) -> None:
    assert light["before"] == [row.memory_bytes for row in plan.candidates]
    assert light["up"] == sorted(light["before"]) != light["before"]
    assert light["down"] == sorted(light["before"], reverse=True)
    assert light["sortUp"] == "ascending"


def test_a_dark_and_narrow_page_is_dark_and_does_not_scroll_sideways(plan: Plan, tmp_path: Path) -> None:
    narrow = probe(render_html(plan), tmp_path, DARK, 420)
    assert narrow["window"] == 420
    assert narrow["overflow"] <= 0
    assert narrow["small"] == 0
    brightness = [sum(map(int, re.findall(r"\d+", narrow[key])[:3])) for key in ("page", "ink")]
    assert brightness[0] < 150 < 600 < brightness[1]


# Visible content of a run's page: boxes of each picture in seconds of its axis, and whether anything overflows.
RUN_PROBE = """
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const box = (node) => node.getBoundingClientRect();
const seen = {
  titles: all("#timeline > p").map((node) => node.textContent),
  rows: all("svg.timeline").map((svg) => all(".idle", svg).length),
  boxes: all("svg.timeline").map((svg) => all("g.event", svg).length),
  ends: all("svg.timeline").map((svg) => Math.max(...all("g.event rect", svg).map((node) => box(node).right))),
  inside: all("svg.timeline g.event text").filter((text) => {
    const [a, b] = [box(text), box(text.parentNode.querySelector("rect"))];
    return a.left < b.left - .5 || a.right > b.right + .5;
  }).length,
  colours: new Set(all("svg.timeline g.event rect").map((node) => getComputedStyle(node).fill)).size,
  terms: all("#terms tbody td").length,
  names: all("#terms tbody td:first-child").map((cell) => {
    const words = document.createRange();
    words.selectNodeContents(cell);
    return words.getClientRects().length;
  }),
  resources: performance.getEntriesByType("resource").length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
};
const result = document.createElement("pre");
result.id = "probe";
result.textContent = JSON.stringify(seen);
document.body.append(result);
"""


def test_a_runs_page_shows_three_timelines_on_one_scale(plan: Plan, tmp_path: Path) -> None:
    few = plan.model_copy(update={"layout": laid(plan.layout, accumulation=8, schedule_hash="")})
    drawing = planned(few, 10_000)
    for rank in range(8):
        path = event_log(tmp_path, rank * (plan.layout.mesh.world_size // 8))
        path.parent.mkdir(exist_ok=True)
        boxes = [box for box in drawing.boxes if box.rank == rank]
        done = [Executed(box.action, 1.25 * box.start_s, 1.25 * box.stop_s, 0.0) for box in boxes]
        late = Executed(done[0].action, done[0].start_s, done[0].stop_s, done[0].start_s)  # since the step began
        event = {
            "v": 1,
            "kind": "pipeline",
            "t": 0.0,
            "rank": rank,
            "data": pipeline_data(3, True, 1e9, [late, *done[1:]]),
        }
        path.write_text(json.dumps(event) + "\n")
    term = {
        "section": "time",
        "term": "parameter_gather",
        "predicted": 1.0,
        "measured": 2.0,
        "ratio": 2.0,
        "measure": "timer",
    }
    found = compare(tmp_path, few)
    summary = RunSummary.model_validate({"terms": [{**term, "unit": "s"}]})
    source = render_run_html(few, "run-<b>", summary, found, "", head=headline(few, read_history(tmp_path), None))
    seen = probe(source, tmp_path, width=1280, script=RUN_PROBE)
    assert [title.split(" ")[0] for title in seen["titles"][1:]] == ["Executed", "Simulated", "Predicted"]
    assert seen["rows"] == [8, 8, 8]
    assert seen["boxes"] == [len(drawing.boxes)] * 3
    assert seen["ends"][1] == pytest.approx(seen["ends"][0], rel=0.02)
    assert seen["ends"][2] < 0.85 * seen["ends"][0]
    assert (seen["inside"], seen["resources"], seen["colours"]) == (0, 0, 2)
    assert seen["overflow"] <= 0
    assert seen["terms"] >= 5
    narrow = probe(source, tmp_path, DARK, 420, script=RUN_PROBE)
    assert narrow["overflow"] <= 0
    assert narrow["names"] == [1]  # lines: names of terms are not broken between letters


# Points at the middle of the loss, drags over its second quarter, and double-clicks.
CURVES_PROBE = """
const all = (selector) => [...document.querySelectorAll(selector)];
const hit = document.querySelector("#curves-loss .hit"), box = hit.getBoundingClientRect();
hit.setPointerCapture = () => {};  // a made event has no pointer
const fire = (name, share) => hit.dispatchEvent(new PointerEvent(name, {
  bubbles: true, button: 0, pointerId: 1, clientX: box.left + share * box.width, clientY: box.top + 20,
}));
const places = () => all("#curves-loss .trace, #curves-lr .trace").map((node) => {
  const points = node.getAttribute("d").slice(1).split("L").map((point) => point.split(" ").map(Number));
  return [points[0], points.at(-1)];
});
const labels = () => all("#curves-loss .columns text").map((node) => Number(node.textContent.replace(",", "")));
const before = places();
fire("pointermove", .5);
const tip = document.getElementById("tip").textContent;
fire("pointerdown", .25);
fire("pointermove", .5);
fire("pointerup", .5);
const zoomed = places(), ticks = labels();
fire("dblclick", .5);
const result = document.createElement("pre");
result.id = "probe";
result.textContent = JSON.stringify({
  before, zoomed, ticks, tip, after: places(), labels: labels(),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
});
document.body.append(result);
"""
COMPARE_PROBE = """
const all = (selector) => [...document.querySelectorAll(selector)];
const visible = () => all("svg.curves").filter((node) => node.checkVisibility()).map((node) => node.id);
const first = visible();
document.querySelector("label[for=over-time]").click();
const result = document.createElement("pre");
result.id = "probe";
result.textContent = JSON.stringify({
  first, second: visible(), strokes: new Set(all(".trace").map((node) => getComputedStyle(node).stroke)).size,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
});
document.body.append(result);
"""


def test_curves_can_be_zoomed_and_read(plan: Plan, tmp_path: Path) -> None:
    write_log(tmp_path, [start(), *steps(1, 401), start(2, 300, BEGAN + 2000), *steps(301, 401, at=BEGAN + 2000)])
    source = render_run_html(plan, "run", None, None, "", head=headline(plan, read_history(tmp_path), None))
    seen = probe(source, tmp_path, width=1280, script=CURVES_PROBE)
    loss, rate = seen["zoomed"]
    width = seen["before"][0][1][0] - seen["before"][0][0][0]
    assert [line[1][0] - line[0][0] for line in (loss, rate)] == pytest.approx([4 * width] * 2, rel=0.01)
    assert loss[0][1] - loss[1][1] < -3 * (seen["before"][0][1][1] - seen["before"][0][0][1])  # heights follow, too
    assert (min(seen["ticks"]), max(seen["ticks"])) == (120, 200)
    assert seen["tip"] == "step 201\ntraining: 2.99"
    for one, other in zip(seen["before"], seen["after"], strict=True):
        assert [*one[0], *one[1]] == pytest.approx([*other[0], *other[1]], abs=0.02)
    assert seen["labels"] == [100, 200, 300, 400]
    assert seen["overflow"] <= 0
    assert probe(source, tmp_path, DARK, 420, script=CURVES_PROBE)["overflow"] <= 0


def test_the_axis_of_a_comparison_is_switched(plan: Plan, tmp_path: Path) -> None:
    runs = []
    for name, last in (("a", 20), ("b", 50)):
        write_log(tmp_path / name, [start(), *steps(1, last)])
        runs.append(compared_run(tmp_path / name, name, None))
    seen = probe(render_compare_html(runs), tmp_path, DARK, 420, script=COMPARE_PROBE)
    assert (seen["first"], seen["second"]) == (["curves-loss-steps"], ["curves-loss-time"])
    assert seen["strokes"] == 2
    assert seen["overflow"] <= 0


def test_a_page_that_reaches_out_would_be_noticed(plan: Plan, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(render_html(plan).replace("</main>", '<img src="http://192.0.2.1/x.png" alt=""></main>'))
    assert any("Content Security Policy" in line for line in browse(page, "--dump-dom")[1])


def test_the_screenshot_shows_something(plan: Plan, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render_html(plan), encoding="utf-8")
    browse(page, f"--screenshot={picture}", "--window-size=1280,4000")
    width, height, rows = _png(picture.read_bytes())
    assert (width, height) == (1280, 4000)
    blank = sum(len(set(row[1:])) < 4 for row in rows)  # One colour, three or four channels; filters add zeros.
    assert blank < 0.6 * height


def _png(data: bytes) -> tuple[int, int, list[bytes]]:
    """Return the size of a PNG of eight-bit channels and its filtered rows."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, size, packed = 8, (0, 0, 0, 0), b""
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            size = struct.unpack(">IIBB", body[:10])
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    width, height, depth, colours = size
    assert depth == 8
    stride = 1 + width * {2: 3, 6: 4}[colours]
    raw = zlib.decompress(packed)
    return width, height, [raw[row * stride : (row + 1) * stride] for row in range(height)]

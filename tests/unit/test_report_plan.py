"""The text of a plan: whole screens at two widths, compared with golden texts; and its numbers."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from partool.cli.main import run
from partool.plan.terms import HOST_TERMS, MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS, glossary
from partool.planner import make_plan
from partool.report import render_plan
from partool.report.tables import render_breakdown
from partool.report.units import amount, duration, gib, seconds
from partool.spec import load_text

GOLDEN = Path(__file__).parent / "golden"
SPEC = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, per_node: 8}
data: {source: /no/such/tokens/*.bin}
training: {sequence_length: 8192, global_batch: 64, steps: 10000}
"""


def screen(width: int, text: str = SPEC) -> str:
    loaded = load_text(text)
    assert loaded.spec is not None
    plan = make_plan(loaded.spec, base_dir=Path("/"), default_name="example").plan
    assert plan is not None
    out = io.StringIO()
    render_plan(plan, Console(file=out, width=width, color_system=None), source="example.yaml")
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_screen(width: int) -> None:
    """PARTOOL_GOLDEN=write renews the texts; look at them before they are committed."""
    got = screen(width, SPEC + "parallel: {data: {zero: 3}, micro_batch: 1}\n")
    file = GOLDEN / f"plan-{width}.txt"
    if os.environ.get("PARTOOL_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")
    assert max(map(len, got.splitlines())) <= width
    assert len(got.splitlines()) <= 66


HOST = """\
model: {layers: 4, hidden: 4096, heads: 32, vocab: 32000}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {global_batch: 64, sequence_length: 4096}
parallel: {recompute: full, micro_batch: 1, offload: {optimizer: cpu, parameters: cpu, activations: none}}
"""


@pytest.mark.parametrize("text", [SPEC, HOST])
def test_every_term_that_is_shown_is_in_the_glossary(text: str) -> None:
    loaded = load_text(text)
    assert loaded.spec is not None
    plan = make_plan(loaded.spec, base_dir=Path("/"), default_name="example").plan
    assert plan is not None
    render_plan(plan, Console(file=(out := io.StringIO()), width=80, color_system=None))
    render_breakdown(plan, Console(file=out, width=80, color_system=None))
    names = []
    for table in re.split(r"\n\s*\n|\n(?=Time per step)", out.getvalue()):
        _, *rows = table.strip().splitlines()
        if rows and re.match("(term|part) ", rows[0]):
            names += [row[: re.search(r" {2,}", row + "  ").start()] for row in rows[1:] if row[:1].isalpha()]  # type: ignore[union-attr]
    assert len(names) > 25
    assert [name for name in names if not glossary(name)] == []


def test_every_term_of_a_runs_report_is_in_the_glossary() -> None:
    terms = [*MEMORY_TERMS, *HOST_TERMS, *TIME_TERMS, *TRAFFIC_TERMS, "total", "predicted", "measured", "ratio"]
    assert [name for name in terms if not glossary(name)] == []
    assert [where for where, _ in glossary("gradients")] == ["memory per rank, bytes", "host memory per rank, bytes"]
    assert [where for where, _ in glossary("host-activations")] == ["host memory per rank, bytes"]
    assert glossary("nothing") == []


def test_figures_are_never_cut() -> None:
    """Host memory has a long line; times go below memory if the two do not fit side by side."""
    loaded = load_text(HOST)
    assert loaded.spec is not None
    plan = make_plan(loaded.spec, base_dir=Path("/"), default_name="example").plan
    assert plan is not None
    beside = {}
    for width in (60, 80, 110, 120, 160):
        out = io.StringIO()
        render_plan(plan, Console(file=out, width=width, color_system=None))
        assert "…" not in out.getvalue(), width
        beside[width] = re.search("peak +Time per step", out.getvalue()) is not None
    assert (beside[80], beside[120], beside[160]) == (False, False, True)
    render_breakdown(plan, Console(file=(out := io.StringIO()), width=100, color_system=None))
    assert re.search("Host memory of the rank.*\nmasters +.*\ntotal +[0-9.]+ *$", out.getvalue(), re.DOTALL)


def test_a_plan_that_cannot_run_says_so() -> None:
    text = screen(100, SPEC + "parallel: {tensor: {degree: 2, overlap: symmetric}}\n")
    assert re.search(r"cannot be launched yet: .*partool explain PT401", text)
    assert "partool launch" not in text


SMALL = """\
model: {layers: 8, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 4}
data: python-stdlib
training: {global_batch: 8, sequence_length: 128, steps: 10}
parallel: {micro_batch: 1, pipeline: PIPELINE}
"""


@pytest.mark.parametrize(
    ("pipeline", "wanted"),
    [
        ("{stages: 2, schedule: hanayo, waves: 2}", "schedule hanayo, 2 waves, 1 layer per stage;"),
        ("{stages: 2, schedule: hanayo, waves: 1}", "schedule hanayo, 1 wave, 2 layers per stage;"),
        ("{stages: 2, schedule: zb-v, in_flight: 3}", "schedule zb-v, at most 3 in flight, 2 layers per stage;"),
        ("{stages: 2, schedule: interleaved, chunks: 2, layers: [1, 3, 3, 1]}", "× 2 chunks, 1 to 3 layers per stage;"),
    ],
)
def test_a_pipeline_in_one_line(pipeline: str, wanted: str) -> None:
    (line,) = [line for line in screen(200, SMALL.replace("PIPELINE", pipeline)).splitlines() if "Layout  " in line]
    assert wanted in line


def test_units() -> None:
    assert [gib(n * 2**30) for n in (0.0131, 4.713, 64.21)] == ["0.013", "4.71", "64.2"]
    assert [seconds(s) for s in (4.3e-5, 1.2e-3, 3.4, 1234.0)] == ["43 us", "1.2 ms", "3.4 s", "1234 s"]
    assert [duration(s) for s in (0.2, 105, 12000, 1051200)] == ["0 s", "1 min 45 s", "3 h 20 min", "12 d 4 h"]
    assert [amount(n) for n in (952, 1.77e6, 8.03e9)] == ["952", "1.77 M", "8.03 B"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("layout", "data", "shard"), 0), (("devices", "per_node"), -1), (("layout", "micro_batch"), 10**30),
        (("layout", "tensor", "degree"), 10**9), (("devices", "fabric_bytes_per_s"), 5e-324),
        (("prediction", "memory", "total_bytes"), 10**400), (("prediction", "time", "step_time_s"), float("nan")),
        (("devices", "nodes"), 7), (("layout", "pipeline", "layers"), [1]), (("layout", "recompute"), []),
        (("layout", "pipeline", "waves"), 1), (("layout", "tensor", "shape"), [1, 2]),
        (("spec", "parallel"), [1]),
    ],
)  # fmt: skip
def test_numbers_of_an_edited_plan_are_refused(
    place: tuple[str, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a spec: numbers that are too large, and pairs that contradict each other."""
    spec = load_text(
        "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 2}\n"
        "data: python-stdlib\ntraining: {sequence_length: 64, global_batch: 8}\n"
    ).spec
    assert spec is not None
    plan = make_plan(spec, base_dir=tmp_path, default_name="edited").plan
    assert plan is not None
    document = json.loads(plan.to_json())
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        run(["--debug", "plan", str(tmp_path / "plan.json")])
    assert ended.value.code == 1
    assert "error[PT503]" in capsys.readouterr().err

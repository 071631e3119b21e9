"""The text of a plan: whole screens at two widths, compared with golden texts; and its numbers."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from planned import plan_of
from rich.console import Console

from partool.cli.main import run
from partool.layout.parameters import count, parameters
from partool.plan.terms import HOST_TERMS, MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS, glossary
from partool.plan.types import Finding, Plan
from partool.planner import make_plan
from partool.report import View, render_plan
from partool.report.gemms import plan_gemms, price_lines, render_gemms
from partool.report.html import render_html
from partool.report.plan import SCREEN_LINES, next_commands
from partool.report.tables import render_breakdown
from partool.report.units import amount, counted, gib, seconds, size
from partool.spec import load_text

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[3]
SPEC = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, per_node: 8}
data: {source: /no/such/tokens/*.bin}
training: {sequence_length: 8192, global_batch: 64, steps: 10000}
"""


PINNED = SPEC + "parallel: {data: {zero: 3}, micro_batch: 1}\n"


@cache
def example(text: str = PINNED) -> Plan:
    return plan_of(text, folder=Path("/"), name="example")


def screen(width: int, text: str = PINNED, view: View | None = None) -> str:
    return printed(example(text), width, ["example.yaml"], view)


def printed(plan: Plan, width: int, source: Sequence[str] | None = None, view: View | None = None) -> str:
    out = io.StringIO()
    render_plan(plan, Console(file=out, width=width, color_system=None), source=source, view=view)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_screen(width: int) -> None:
    """PARTOOL_GOLDEN=write renews the texts; look at them before they are committed."""
    got = screen(width)
    file = GOLDEN / f"plan-{width}.txt"
    if os.environ.get("PARTOOL_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")
    assert max(map(len, got.splitlines())) <= width
    assert len(got.splitlines()) <= SCREEN_LINES


def test_the_verdict_comes_first_and_the_rest_on_demand() -> None:
    texts = [screen(80), *(screen(80, view=view) for view in (View(why=True), View(table=True), View(everything=True)))]
    (first,) = {" ".join(text.partition("\n\n")[0].split()) for text in texts}
    assert re.fullmatch(
        r"example: fits \([\d.]+ % sure\), [\d.]+ s per step tuned -\d+/\+\d+%, [\d.]+ s as most first runs, "
        r"\d+ h \d+ min in all",
        first,
    )
    short, why, table, whole = texts
    rows = ["Model", "Machines", "Training", "Data", "Optimizer", "Checkpoint", "Stop", "Layout", "Memory", "Time"]
    answers = ["Fits", "Why", "Next best", "Limit", "Sure"]
    assert re.findall(r"^([A-Z][a-z]+(?: best)?) {2,}", short, re.MULTILINE) == [*rows, *answers, "More"]
    for name in ("Memory per rank, at the peak", "Time per step"):
        assert name in table
        assert name in whole
        assert name not in short + why
    plan = example()
    reasons = [f"Limit: {plan.limit}", *plan.reasons]
    for text in (why, whole):
        flat = " ".join(text.split())
        assert all(" ".join(reason.split()) in flat for reason in reasons)
    assert set(rows) <= set(re.findall(r"^([A-Z][a-z]+) {2,}", whole, re.MULTILINE))
    assert "Next\n  partool launch example.yaml\n" in short
    assert "Next\n" not in why + table


def test_a_large_plan_takes_one_screen_and_says_what_is_left_out() -> None:
    reasons = tuple(f"Reason {number}: " + "word " * 20 for number in range(25))
    plan = example().model_copy(update={"reasons": reasons})
    got = printed(plan, 80, ["example.yaml"])
    assert "Reason" not in got
    assert (
        f"--why ({len(reasons) + 1} reasons), --table (terms, {counted(len(plan.alternatives), 'other layout')}), --all"
        in got
    )
    before = printed(plan.model_copy(update={"answers": ()}), 80)
    assert re.search(rf"^Limit {{7}}{re.escape(plan.limit[:20])}", before, re.MULTILINE)
    many = tuple(Finding(code="PT302", message=f"warning {number} " + "w" * 60) for number in range(30))
    crowded = plan.model_copy(update={"findings": many})
    assert len(printed(crowded, 80).splitlines()) <= SCREEN_LINES
    assert re.search(r"^ {3}2\d more: --all$", printed(crowded, 80), re.MULTILINE)
    assert printed(crowded, 80, view=View(everything=True)).count("PT302 warning") == 30


def test_the_rows_say_the_sizes_that_the_spec_leads_to(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 99_999)
    text = """\
model: {layers: 4, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 2, price_per_device_hour: 250000}
data: {source: [a.txt, a.txt], validation: 0.2}
training: {global_batch: 8, sequence_length: 125, steps: 100}
optimizer: {lr: 2.5e-4, schedule: {kind: wsd, warmup_steps: 10, decay_steps: 25}}
checkpoint: {every: 20, keep: 2}
parallel: {recompute: [full, none, none, none]}
"""
    plan = plan_of(text, folder=tmp_path, name="sizes")
    flat = " ".join(printed(plan, 200).split())
    assert "100 steps × 8 sequences × 125 tokens = 100 k tokens" in flat
    assert "a.txt and 1 more: 80 k tokens, and 20% held out; 1.25 epochs" in flat
    assert "adamw, learning rate 0.00025, 10 warm-up steps, then constant, to 10% in the last 25 steps" in flat
    assert f"{size(12 * count(parameters(plan.model)))} each, every 20 steps, the last 2 kept" in flat
    assert "device-hours at 250,000 each" in flat
    assert "recompute full × 1, none × 3" in flat
    cost = 250_000 * plan.prediction.time.device_hours
    assert f", costs {cost:,.0f}" in flat.partition(" Model ")[0]
    unknown = plan_of(text.replace("[a.txt, a.txt]", "/none/*.jsonl"), "hardware.accelerator=h100-sxm", folder=tmp_path)
    assert "/none/*.jsonl: number of tokens unknown (the files are not on this machine; plan" in printed(unknown, 200)
    before = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"totals": None})})
    assert "every 20 steps, the last 2 kept" in printed(before, 200)  # a plan of an earlier version


CPU = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 2}
data: python-stdlib
training: {sequence_length: 64, global_batch: 8}
"""


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    plan = example()
    words = ["my specs/a b.yaml", "--set", 'launch.env={A: "b c"}', "--set", "training.steps=" + "1" * 60]
    words += ["--set", "name=x", "--trust-remote-code"]
    for width in (40, 80, 400):
        lines = next_commands(plan, words, width)
        done = subprocess.run(
            ["sh", "-c", "partool() { printf '%s\\0' \"$@\"; }\n" + "\n".join(lines)], capture_output=True, text=True
        )
        assert done.stdout.split("\0")[:-1] == ["launch", *words]
        assert all(len(line) <= width - 2 for line in lines if "1" * 60 not in line and "b c" not in line)
        assert "\n".join(f"  {line}" for line in lines) in printed(plan, width, words)
    assert len(next_commands(plan, words, 400)) == 1
    nodes = plan_of(CPU, "hardware.nodes=2", "hardware.fabric=ethernet-100g", folder=tmp_path)
    assert next_commands(nodes, ["a.yaml"], 80) == ["partool launch a.yaml --target slurm"]
    by_hand = plan_of(CPU, "launch.target=torchrun", folder=tmp_path)
    assert shlex.join(["partool", "launch", *words]) in html.unescape(render_html(plan, words))
    assert next_commands(by_hand, ["a.yaml"], 80) == ["partool render a.yaml --target torchrun"]


def test_a_plan_that_may_not_fit_says_so_first(tmp_path: Path) -> None:
    plan = example()
    for verdict, share, words in (("amber", 0.6312, "may not fit (63.1 % sure)"), ("red", 0.2, "does not fit (20.0 %")):
        memory = plan.prediction.memory.model_copy(update={"verdict": verdict, "fit_probability": share})
        changed = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"memory": memory})})
        assert words in printed(changed, 80).splitlines()[0]


def test_figures_keep_their_units_where_lines_end() -> None:
    units = r"us|ms|s|min|h|days?|[KMGT]iB|[kMBT]|%|×"
    for width in range(50, 120):
        assert not re.search(rf"\d\n +({units})(\W|$)|[×±≥]\n", screen(width), re.MULTILINE), width
    assert re.search(rf"\d\n +({units})(\W|$)", "takes 3\n   GiB more")


@pytest.mark.parametrize("others", [["--show", "layout"], ["--breakdown"], ["--output", "json"], ["--check"]])
def test_views_of_the_text_go_alone(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["plan", str(ROOT / "specs" / "quickstart.yaml"), "--why", *others])
    assert ended.value.code == 2
    assert "--why, --table and --all are views" in capsys.readouterr().err


HOST = """\
model: {layers: 4, hidden: 4096, heads: 32, vocab: 32000}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {global_batch: 64, sequence_length: 4096}
parallel: {recompute: full, micro_batch: 1, offload: {optimizer: cpu, parameters: cpu, activations: none}}
"""


@pytest.mark.parametrize("text", [PINNED, HOST])
def test_every_term_that_is_shown_is_in_the_glossary(text: str) -> None:
    plan = example(text)
    render_plan(plan, Console(file=(out := io.StringIO()), width=80, color_system=None), view=View(table=True))
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
    plan = example(HOST)
    beside = {}
    for width in (60, 80, 110, 120, 160):
        out = io.StringIO()
        render_plan(plan, Console(file=out, width=width, color_system=None), view=View(everything=True))
        assert "…" not in out.getvalue(), width
        beside[width] = re.search("peak +Time per step", out.getvalue()) is not None
    assert (beside[80], beside[120], beside[160]) == (False, False, True)
    render_breakdown(plan, Console(file=(out := io.StringIO()), width=100, color_system=None))
    assert re.search("Host memory of the rank.*\nmasters +.*\ntotal +[0-9.]+ *$", out.getvalue(), re.DOTALL)


def test_a_plan_that_cannot_run_says_so() -> None:
    text = screen(100, SPEC + "parallel: {tensor: {degree: 2, overlap: symmetric}}\n")
    assert "cannot be launched (PT401)" in text.splitlines()[0]
    assert "Next: why it cannot be launched yet\n  partool explain PT401\n" in text
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
    (line,) = [line for line in screen(250, SMALL.replace("PIPELINE", pipeline)).splitlines() if "Layout  " in line]
    assert wanted in line


def test_units() -> None:
    assert [gib(n * 2**30) for n in (0.0131, 4.713, 64.21)] == ["0.013", "4.71", "64.2"]
    assert [seconds(s) for s in (4.3e-5, 1.2e-3, 3.4, 1234.0)] == ["43 us", "1.2 ms", "3.4 s", "1234 s"]
    assert [size(n) for n in (812, 1.5 * 2**20, 64.21 * 2**30, 2.3112 * 2**40)] == [
        "812 B", "1.5 MiB", "64.2 GiB", "2.31 TiB",
    ]  # fmt: skip
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


def test_the_breakdown_says_whose_measurements_the_prices_are() -> None:
    experts = "model: mixtral-8x7b\nhardware: {accelerator: h200, nodes: 4}\ndata: {source: /no/such/*.bin}\n"
    lines = price_lines(example(experts + "training: {sequence_length: 4096, global_batch: 256, steps: 9}\n"))
    named = {re.split("[ :,]", line)[0] for line in lines}
    assert {"attention.q", "attention", "experts", "all_gather", "reduce_scatter"} <= named
    assert not any(": assumed, " in line for line in lines)
    assert sum("cuBLAS" in line for line in lines) == 1
    cpu = "model: {preset: gpt2, layers: 2}\nhardware: {accelerator: cpu}\ndata: python-stdlib\n"
    lines = price_lines(example(cpu + "training: {sequence_length: 64, global_batch: 8, steps: 9}\n"))
    assert all(": assumed, " in line for line in lines)


def test_products_fit_80_columns_and_each_price_has_its_source() -> None:
    out, plan = io.StringIO(), example()
    render_gemms(plan, Console(file=out, width=80, color_system=None))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("(a)") == len(plan_gemms(plan)) + 1
    assert re.search(r"\(a\) cuBLAS linear layer on h100-sxm", text)
    assert re.search(r"^attention\.k, v; ffn\.down: × 1\.\d\d for clocks", text, re.MULTILINE)

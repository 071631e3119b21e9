"""Other queries than the plan: the smallest cluster, the largest sizes, what-ifs; and bad input of every kind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from often import often
from planned import spec_of

from partool.cli.main import run
from partool.diagnostics.record import Diagnostic
from partool.plan.diff import moved_inputs
from partool.planner import make_plan
from partool.planner.queries import combinations, largest, smallest_cluster
from partool.spec import load_text
from partool.spec.spec import Spec
from partool.work import traced

ROOT = Path(__file__).parents[3]
MODEL = "model: {layers: 8, hidden: 2048, heads: 16, kv_heads: 8, vocab: 32000}\n"
ONE_NODE = MODEL + "hardware: {accelerator: h100-sxm, per_node: 4}\ndata: python-stdlib\n"
ON_DEVICE = "parallel: {offload: {optimizer: none, parameters: none, activations: none}}\n"


def findings(text: str, overrides: list[str] | None = None) -> list[Diagnostic]:
    loaded = load_text(text, overrides=overrides)
    if loaded.spec is None:
        return loaded.diagnostics
    return make_plan(loaded.spec, base_dir=ROOT, default_name="test").diagnostics


def sure(spec: Spec) -> bool:
    plan = make_plan(spec, base_dir=ROOT, default_name="test").plan
    return plan is not None and plan.prediction.memory.verdict == "green"


def test_the_smallest_cluster_fits_and_a_smaller_one_does_not() -> None:
    text = "model: llama3-8b\nhardware: {accelerator: a10g, per_node: 4}\ndata: python-stdlib\n"
    text += ON_DEVICE.replace("{offload", "{tensor: 1, sequence: 1, pipeline: 1, offload")
    found = smallest_cluster(spec_of(text), ROOT)
    assert found is not None
    nodes = int(found[0].partition("=")[2])
    assert nodes > 1
    assert sure(spec_of(text, *found))
    assert not sure(spec_of(text, f"hardware.nodes={nodes - 1}", found[1]))
    small = smallest_cluster(spec_of(ONE_NODE + ON_DEVICE), ROOT)
    assert small == ["hardware.nodes=1", "hardware.per_node=1"]


@pytest.mark.parametrize(
    ("what", "step"),
    often(
        [("micro_batch", 0), ("sequence_length", 256), ("global_batch", 4)], [("micro_batch", 0), ("global_batch", 4)]
    ),
)
def test_the_largest_value_fits_and_a_larger_one_does_not(what: str, step: int) -> None:
    text = ONE_NODE + ON_DEVICE.replace("{offload", "{tensor: 1, pipeline: 1, compile: none, offload")
    text += "training: {sequence_length: 4096, global_batch: 64}\n"
    text = text.replace("per_node: 4", "per_node: 4, memory_gib: 20")
    found = largest(spec_of(text), ROOT, what)  # type: ignore[arg-type]
    assert found is not None
    key, _, value = found[0].partition("=")
    assert sure(spec_of(text, *found))
    if step and what == "sequence_length":
        assert not sure(spec_of(text, f"{key}={int(value) + step}"))
    if what == "micro_batch":
        assert 1 < int(value) <= 64


def test_combinations_are_products_and_keep_brackets() -> None:
    assert combinations(["hardware=h100-sxm,a100-80", "parallel.data.zero=1,3"]) == [
        ["hardware.accelerator=h100-sxm", "parallel.data.zero=1"],
        ["hardware.accelerator=h100-sxm", "parallel.data.zero=3"],
        ["hardware.accelerator=a100-80", "parallel.data.zero=1"],
        ["hardware.accelerator=a100-80", "parallel.data.zero=3"],
    ]
    (first, second) = combinations(["parallel.recompute=[none, full],full"])
    assert (first, second) == (["parallel.recompute=[none, full]"], ["parallel.recompute=full"])
    for wrong in ("hardware", "=a", "hardware=", "hardware=a,,b"):
        with pytest.raises(ValueError, match="is not key=value"):
            combinations([wrong])


BAD = {
    "heads": (["parallel.tensor={shape: [2, 2]}", "model.kv_heads=2"], "PT456", "use [4, 1]"),
    "stages": (["parallel.pipeline=9"], "PT264", "use at most 8"),
    "chunks": (["parallel.pipeline={stages: 4, schedule: interleaved, chunks: 3}"], "PT264", "use at most 2"),
    "product": (["parallel.tensor=4", "parallel.pipeline=2"], "PT267", "can be"),
    "one degree": (["parallel.pipeline=3"], "PT267", "it can be 1, 2 or 4"),
    "shard": (["parallel.data={zero: 3, shard: 3}"], "PT269", "use 2 or 4"),
    "batch": (["parallel.micro_batch=3"], "PT259", "use 255 or 258"),
    "pinned batch": (
        ["parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=1", "training.global_batch=6"],
        "PT259",
        "use 4 or 8",
    ),
    "experts": (["parallel.expert=2"], "PT266", "drop it"),
    "policies": (["parallel.recompute=[none, full]"], "PT271", "name one policy per layer"),
    "width": (["model.ffn_hidden=5001", "parallel.tensor={shape: [2, 2]}"], "PT456", "or [4, 1]"),
    "shape": (["parallel.tensor={degree: 4, shape: [2, 4]}"], "PT455", "use [4, 1] or [2, 2]"),
    "norms": (["parallel.tensor={shape: [2, 2], sequence_norms: true}"], "PT457", "shape: [4, 1]"),
    "ring of weights": (["parallel.tensor=2", "parallel.pipeline={stages: 2, schedule: weipipe}"], "PT459", "1f1b"),
    "sequence": (["parallel.sequence=4", "training.sequence_length=3"], "PT265", "use at most 3"),
    "zero size": (["training.global_batch=0"], "PT104", ""),
    "negative size": (["model.layers=-1"], "PT104", ""),
    "no bf16": (["hardware.accelerator=v100-32"], "PT263", "fp16"),
    "no fp8": (["hardware.accelerator=a100-80", "training.precision=fp8"], "PT263", "bf16"),
}


@pytest.mark.parametrize(("overrides", "code", "help"), BAD.values(), ids=BAD)
def test_bad_input_is_a_finding_with_a_way_out(overrides: list[str], code: str, help: str) -> None:
    errors = [finding for finding in findings(ONE_NODE, overrides) if finding.severity == "error"]
    (found,) = (finding for finding in errors if finding.code == code)
    assert found.path
    assert help in found.help


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["hardware.nodes=100000", "hardware.per_node=5"], marks=pytest.mark.long),
        ["hardware.nodes=509", "hardware.per_node=1", "training.global_batch=509"],
        ["model.hidden=10000000", "model.layers=12", "model.heads=16"],  # 10^15 parameters
        ["training.sequence_length=1000003"],
        ["training.global_batch=1000003"],
        ["hardware.nodes=1000000"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_extreme_sizes_end_in_a_plan_or_a_finding(overrides: list[str]) -> None:
    loaded = load_text(ONE_NODE, overrides=overrides)
    if loaded.spec is None:
        assert [finding.code for finding in loaded.diagnostics] == ["PT104"]
        return
    result = make_plan(loaded.spec, base_dir=ROOT, default_name="test")
    errors = [finding for finding in result.diagnostics if finding.severity == "error"]
    assert (result.plan is None) == bool(errors)
    assert all(finding.help for finding in errors)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run(["plan", *arguments])
    shown = capsys.readouterr()
    code = end.value.code
    return (code if isinstance(code, int) else 0), shown.out, shown.err


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    few = "parallel: {tensor: 1, pipeline: 1, sequence: 1, offload: none}\n"
    path.write_text(ONE_NODE + "training: {global_batch: 8, sequence_length: 512}\n" + few, encoding="utf-8")
    return str(path)


def test_a_fresh_trace_is_named_among_the_inputs(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """The runtime's answer is replaced by recorded data."""
    shipped = traced.DATA.read_text("utf-8")

    def answer(command: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        assert json.loads(str(given["input"]))["model"]["layers"] == 8
        return subprocess.CompletedProcess(command, 0, stdout=shipped.replace("{", "{ ", 1), stderr="")

    wanted = spec_of(Path(spec).read_text(encoding="utf-8"))
    plain = make_plan(wanted, base_dir=ROOT, default_name="test").plan
    monkeypatch.setattr("partool.work.traced.subprocess.run", answer)
    fresh = make_plan(wanted, base_dir=ROOT, default_name="test", trace=True).plan
    assert plain is not None
    assert fresh is not None
    assert fresh.prediction == plain.prediction
    assert moved_inputs(plain, fresh) == ["cost/trace"]


def test_a_trace_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setattr("sys.executable", "false")
    wanted = spec_of(Path(spec).read_text(encoding="utf-8"))
    result = make_plan(wanted, base_dir=ROOT, default_name="test", trace=True)
    assert [finding.code for finding in result.diagnostics] == ["PT303"]
    assert result.plan is None


def test_what_ifs_have_a_row_each(capsys: pytest.CaptureFixture[str], spec: str) -> None:
    code, out, _ = call(capsys, spec, "--vary", "hardware=h100-sxm,t4", "--output", "json")
    assert code == 0
    rows = json.loads(out)
    assert [row["with"] for row in rows] == [["hardware.accelerator=h100-sxm"], ["hardware.accelerator=t4"]]
    assert rows[0]["plan"]["devices"] == 4
    assert rows[1]["plan"] is None
    assert rows[1]["problem"].startswith("PT263")
    code, out, _ = call(capsys, spec, "--vary", "training.global_batch=8,16")
    assert code == 0
    assert "global_batch" in out
    assert call(capsys, spec, "--vary", "no.such.key=1")[0] == 1
    assert call(capsys, spec, "--vary", "hardware")[0] == 2


def test_check_takes_many_specs(capsys: pytest.CaptureFixture[str], spec: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(ONE_NODE + "parallel: {tensor: 7}\n", encoding="utf-8")
    assert call(capsys, "--check", spec, spec)[0] == 0
    code, out, _ = call(capsys, "--check", spec, str(bad), "--output", "json")
    assert code == 1
    told = json.loads(out)
    assert [one["ok"] for one in told["specs"]] == [True, False]
    assert told["specs"][1]["diagnostics"][0]["code"] == "PT267"
    code, out, _ = call(capsys, "--check", spec, str(bad), "--output", "sarif")
    assert code == 1
    assert '"PT267"' in out
    assert call(capsys, spec, str(bad))[0] == 2


def test_drift_names_the_inputs_that_moved(capsys: pytest.CaptureFixture[str], spec: str, tmp_path: Path) -> None:
    old = str(tmp_path / "old.json")
    assert call(capsys, spec, "--out", old)[0] == 0
    assert call(capsys, spec, "--against", old)[0] == 0
    change = ["--set", "training.global_batch=16"]
    code, out, _ = call(capsys, spec, "--against", old, *change)
    assert code == 10
    assert "training.global_batch: 8 → 16" in out
    assert "inputs that moved: spec" in out
    code, out, _ = call(capsys, spec, "--against", old, *change, "--output", "json")
    assert (code, json.loads(out)["moved"]) == (10, ["spec"])
    code, out, _ = call(capsys, spec, "--diff", old, *change)
    assert code == 0
    assert "step_time" in out
    code, out, _ = call(capsys, spec, "--diff", old, "--output", "json")
    assert json.loads(out)["same"]


@pytest.mark.parametrize(
    "view", [["--show", "gemms"], ["--show", "kernels"], ["--show", "layout"], ["--breakdown"], ["--smallest"]]
)
def test_views_print(capsys: pytest.CaptureFixture[str], spec: str, view: list[str]) -> None:
    code, out, _ = call(capsys, spec, *view)
    assert code == 0
    assert len(out.splitlines()) > 3
    code, out, _ = call(capsys, spec, *view, "--output", "json")
    assert code == 0
    assert json.loads(out)

"""The Python face: its names, its cost, its findings and files beside those of the commands, its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import partool
from partool import Diagnostic, Plan, SpecError, check, load, plan, render
from partool.cli.main import run

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guide" / "python.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SPEC = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256},
    "hardware": {"accelerator": "h100-sxm", "per_node": 8},
    "training": {"sequence_length": 64, "global_batch": 16, "steps": 10},
    "parallel": {"tensor": 2, "pipeline": 1, "data": {"shard": 4}, "micro_batch": 2, "recompute": "none"},
    "data": "python-stdlib",
    "launch": {"slurm": {"time": "01:00:00"}},
}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(SPEC))
    return file


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_at_most_ten_names_each_on_the_page() -> None:
    assert len(partool.__all__) <= 10
    assert [name for name in partool.__all__ if f"`{name}" not in PAGE] == []
    assert {name: getattr(partool, name).__name__ for name in partool.__all__ if name != "__version__"} == {
        name: name for name in partool.__all__ if name != "__version__"
    }
    with pytest.raises(AttributeError, match="no attribute 'lanuch'"):
        _ = partool.lanuch


@pytest.mark.parametrize("first", ["partool.plan.types", "partool.render.render"])
def test_names_are_functions_whatever_was_imported_before(first: str) -> None:
    code = f"import {first}\n"
    code += "from partool import plan, render\nassert plan.__module__ == render.__module__ == 'partool.api'"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_importing_it_is_cheap() -> None:
    code = "import sys\nfrom partool import load, plan, render, check, SpecError\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "pydantic", "yaml", "typer", "rich", "jinja2"}
    own = {name for name in done.stdout.split() if name.startswith("partool")}
    assert own == {"partool", "partool.api", "partool.plan", "partool.render", "partool.version"}


def test_plans_and_files_are_those_of_the_commands(spec: Path) -> None:
    assert command("plan", "spec.yaml", "--set", "training.steps=20", "--out", "plan.json") == 0
    result = plan(spec, {"training.steps": 20})
    assert result.to_json() == Path("plan.json").read_text()
    assert plan(load(spec, ["training.steps=20"])).hash == result.hash
    assert plan(SPEC, {"training": {**SPEC["training"], "steps": 20}}).hash == result.hash
    for target in ("slurm", "torchrun"):
        assert command("render", "plan.json", "--target", target, "--out", target) == 0
        files = render(result, target).files
        assert files == {name: (Path(target) / name).read_text() for name in files}
    assert result.launch.target == "local"
    older = Plan.from_json(result.model_copy(update={"partool_version": "0.1.0"}).to_json())
    assert (older.partool_version, older.hash) == ("0.1.0", result.hash)


def test_findings_are_those_of_the_commands(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of both kinds: those of reading a spec, and those that planning it finds."""
    for override in ("training.stepps=3", "parallel.tensor=3", "model.layers=100000"):
        assert command("plan", "spec.yaml", "--set", override) == 1
        printed = capsys.readouterr().err.replace("spec.yaml", str(spec))
        with pytest.raises(SpecError) as error:
            plan(spec, [override])
        assert re.findall(r"error\[.*", str(error.value)) == re.findall(r"error\[.*", printed)
        assert check(spec, [override]) == error.value.findings
        assert all(isinstance(finding, Diagnostic) for finding in error.value.findings)
    with pytest.raises(SpecError, match=r"error\[PT001\]: there is no file 'none.yaml'"):
        load("none.yaml")


def test_what_a_target_refuses_is_raised(spec: Path) -> None:
    result = plan(spec)
    with pytest.raises(SpecError, match="PT523"):
        render(result, "k8s")
    with pytest.raises(ValueError, match="there is no target 'slrum'"):
        render(result, "slrum")
    with pytest.raises(ValueError, match="give them to load"):
        plan(load(spec), {"training.steps": 3})
    with pytest.raises(SpecError, match=r"PT505.*\(PT499\)"):
        render(result.model_copy(update={"runnable": False, "not_runnable": ("PT499",)}), "slurm")


def test_paths_and_one_override_are_taken_as_they_are(spec: Path) -> None:
    loaded = load(SPEC | {"data": spec.parent / "*.txt"}, "training.steps=3").spec
    assert loaded is not None
    assert (loaded.data.source, loaded.training.steps) == (str(spec.parent / "*.txt"), 3)
    loaded = load(spec, {"data.source": spec.parent}).spec
    assert loaded is not None
    assert loaded.data.source == str(spec.parent)


def test_what_no_spec_can_be_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match=r"model\.layers is a set: a spec holds numbers"):
        check(SPEC | {"model": {"layers": {1}}})
    with pytest.raises(TypeError, match=r"training\.steps is a object"):
        load(SPEC, {"training.steps": object()})
    for wrong in (None, ["spec.yaml"]):
        with pytest.raises(TypeError, match="a spec is a path or a mapping of its sections, not"):
            load(wrong)
    with pytest.raises(TypeError, match="render takes what plan returns, not str"):
        render("plan.json")


@pytest.mark.parametrize("example", EXAMPLES, ids=[text.splitlines()[-1][:40] for text in EXAMPLES])
def test_examples_of_the_page_run(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(example, "python.md", "exec"), {})
    assert "print" not in example or capsys.readouterr().out

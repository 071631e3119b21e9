"""Specs and plans that people bring from other tools: mistakes are named while planning, sound ones are planned.

Every broken spec names the project and the thread (GitHub issue or pull request) where it cost somebody a run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from broken import layouts, models, plans, values
from broken.case import CPU, SOUND, Broken, spec
from broken.sound import SPECS
from planned import plan_of, result_of

from partool.cli._load import read_plan_or_exit
from partool.planner import make_plan
from partool.spec import load, load_text
from partool.spec._pydantic import dotted

CORPUS = [*layouts.CASES, *values.CASES, *models.CASES]
_THREAD = re.compile(r"^[\w .-]+ #\d+: ")


def test_the_corpus_is_large_and_names_its_threads() -> None:
    assert len(CORPUS) >= 60
    assert len({(case.text, *case.files.values()) for case in CORPUS}) == len(CORPUS)
    assert all(_THREAD.match(case.thread) for case in CORPUS)
    assert len({case.code for case in CORPUS}) >= 30


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.thread.partition(":")[0])
def test_a_mistake_is_named_at_its_place_with_what_to_write(case: Broken, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(case.text, encoding="utf-8")
    for name, content in case.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    loaded = load(file)
    found, planned = list(loaded.diagnostics), False
    if loaded.spec is not None and not any(finding.severity == "error" for finding in found):
        result = make_plan(loaded.spec, base_dir=tmp_path, default_name="broken")
        found += loaded.source.attach(result.diagnostics)
        planned = result.plan is not None
    assert [(finding.code, finding.severity) for finding in found] == [(case.code, case.severity)], found
    [finding] = found
    assert planned == (case.severity == "warning")
    assert dotted(finding.path) == case.at
    assert case.says in f"{finding.message}; {finding.help}"
    assert finding.span is not None
    written = case.text.split("\n")[finding.span.line - 1]
    assert [part for part in finding.path if isinstance(part, str)][-1] in written


@pytest.mark.parametrize(("line", "code", "help"), values.ALMOST)
def test_a_value_that_is_almost_right_gets_the_right_one(line: str, code: str, help: str) -> None:
    [finding] = load_text(spec(SOUND) + line + "\n").diagnostics
    assert finding.code == code
    assert help in finding.help


@pytest.mark.parametrize(
    ("figure", "help"),
    [
        ("gpus: 8", "did you mean `per_node`?"),
        ("memory_gib: 80GB", "write 80: the name ends with the unit"),
        ("memory_gib: 85899345920", "the name ends with the unit"),
    ],
)
def test_units_and_devices_of_the_hardware(figure: str, help: str) -> None:
    [finding] = load_text(spec(SOUND | {"hardware": f"{{accelerator: h100-sxm, {figure}}}"})).diagnostics
    assert finding.help == help


def test_weights_that_fit_and_come_later_are_not_refused(tmp_path: Path) -> None:
    """A folder of the model's own sizes is sound; one that only the nodes have is a warning."""
    sizes = models.LLAMA | {"num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    model = "{{layers: 2, hidden: 64, heads: 4, ffn_hidden: 192, vocab: 256, weights: {{source: hf, path: {}}}}}"
    assert not result_of(spec(SOUND | CPU | {"model": model.format(".")}), folder=tmp_path).diagnostics
    away = {"model": model.format("/models/there"), "hardware": "{accelerator: h100-sxm, per_node: 1}"}
    found = result_of(spec(SOUND | CPU | away), folder=tmp_path)
    assert [(finding.code, finding.severity) for finding in found.diagnostics] == [("PT620", "warning")]
    assert found.plan is not None


def test_restarts_need_a_checkpoint_before_the_end() -> None:
    text = spec(SOUND) + "launch: {restarts: 2}\ntraining: {steps: 100}\ncheckpoint: {every: 100}\n"
    [finding] = load_text(text).diagnostics
    assert (finding.code, finding.severity) == ("PT227", "warning")
    assert "every: 10" in finding.help
    assert not load_text(text.replace("every: 100", "every: 50")).diagnostics


@pytest.mark.parametrize(("thread", "text"), SPECS, ids=lambda value: str(value).partition(":")[0])
def test_what_others_cannot_train_is_planned(thread: str, text: str) -> None:
    """Without these, the corpus could be satisfied by refusing everything."""
    plan = plan_of(text)
    assert plan.runnable, thread
    assert not [finding for finding in plan.findings if finding.code != "PT470"]
    assert not plan.contradiction


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    plan = plan_of(plans.PLANNED)
    assert not plan.contradiction
    document: dict[str, Any] = json.loads(plan.to_json())
    return document


@pytest.mark.parametrize(("why", "edits", "says"), plans.EDITS, ids=lambda value: str(value)[:24])
def test_a_plan_that_contradicts_itself_is_refused(
    why: str,
    edits: dict[str, Any],
    says: str,
    planned: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(json.dumps(planned))
    for name, value in edits.items():
        *outer, last = name.split(".")
        section = document
        for key in outer:
            section = section[key]
        section[last] = value
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(typer.Exit) as ended:
        read_plan_or_exit(file)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert "PT503" in said, why
    assert says in " ".join(said.split())
    assert "make it again" in said

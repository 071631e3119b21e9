"""Specs that ``partool eval`` makes: each is planned, and none has what only training reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from partool.launch.evaluating import TasksOption, base_dir_of, spec_of_folder, spec_of_run
from partool.plan.types import Plan
from partool.planner.loaded import plan_loaded
from partool.spec.loader import load_text

TRAINED = """\
model: {layers: 2, hidden: 64, heads: 4}
hardware: {accelerator: cpu, per_node: 2}
parallel: {pipeline: {stages: 2, schedule: 1f1b}, recompute: full, micro_batch: 4}
training: {sequence_length: 32, global_batch: 32, epochs: 2, ema: 0.9, z_loss: 0.001, validation: {every: 5}}
optimizer: {lr: 0.001}
data: {source: text, validation: 0.1}
checkpoint: {every: 10}
launch: {restarts: 2}
telemetry: {profile: {steps: [3, 4]}}
"""


@pytest.fixture
def trained(tmp_path: Path) -> Plan:
    """The plan of a run whose spec lies beside its data."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("hello " * 3000)
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "step-00000010" / "file").write_text("")
    return planned(yaml.safe_load(TRAINED), tmp_path)


def planned(spec: dict[str, Any], folder: Path) -> Plan:
    plan, findings = plan_loaded(load_text(yaml.safe_dump(spec), "mine.yaml"), folder / "mine.yaml")
    assert plan is not None, findings
    return plan


def test_a_run_is_evaluated_by_its_own_spec(trained: Plan, tmp_path: Path) -> None:
    assert base_dir_of(trained) == tmp_path
    spec = spec_of_run(trained, tmp_path / "step-00000010", TasksOption())
    assert not spec.keys() & {"optimizer", "checkpoint", "launch", "telemetry", "evaluation"}
    assert spec["parallel"] == {"pipeline": {"stages": 2}, "micro_batch": 4}
    assert spec["training"] == {"sequence_length": 32, "global_batch": 32, "steps": trained.training.steps}
    plan = planned(spec, base_dir_of(trained))
    assert (plan.job, plan.name, plan.layout.mesh.pp) == ("evaluate", "eval-mine", 2)
    assert plan.weights.path == str(tmp_path / "step-00000010")
    assert plan.data.source == trained.data.source
    assert plan.model.vocab == trained.model.vocab


def test_tasks_take_the_place_of_data(trained: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    asked = TasksOption(("arc_easy", "mine.yaml"), Path("text"), limit=5, num_fewshot=0)
    plan = planned(spec_of_run(trained, tmp_path / "step-00000010", asked), base_dir_of(trained))
    evaluation = plan.evaluation
    assert evaluation.tasks == ["arc_easy", str(tmp_path / "mine.yaml")]
    assert evaluation.include_path == str(tmp_path / "text")
    assert (evaluation.limit, evaluation.num_fewshot, plan.data.source) == (5, 0, [])
    assert plan.judges_by_tasks
    assert plan.prediction.time.total_s == 0.0, "nobody knows how many requests there are"
    assert any("how many requests" in reason for reason in plan.reasons)


def test_a_folder_of_transformers_has_a_spec(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 96, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of_folder(tmp_path, TasksOption(("arc_easy",)), by_transformers=False)
    assert spec["training"] == {"global_batch": 64, "sequence_length": 96, "precision": "fp32"}
    assert spec["model"]["config"] == str(tmp_path / "config.json")
    assert spec_of_folder(tmp_path, TasksOption(), by_transformers=True)["model"]["hf"] == str(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert spec_of_folder(tmp_path, TasksOption(), by_transformers=True)["training"]["sequence_length"] == 4096


def test_paths_start_here_where_none_is_relative(trained: Plan) -> None:
    spec = trained.spec | {"data": {"source": trained.data.source, "validation": 0.1}}
    assert base_dir_of(trained.model_copy(update={"spec": spec})) == Path.cwd()


def test_paths_of_validation_sets_tell_where_they_start(tmp_path: Path) -> None:
    for name in ("text", "facts"):
        (tmp_path / f"{name}.txt").write_text("hello " * 3000)
    spec = yaml.safe_load(TRAINED) | {
        "data": {"source": str(tmp_path / "text.txt"), "validation_sets": {"facts": "facts.txt"}}
    }
    assert base_dir_of(planned(spec, tmp_path)) == tmp_path

"""The section ``telemetry``: what it refuses, what it replaces, and how older plans are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _telemetry import small_plan

from partool.plan.outline import outline
from partool.plan.tracking import outline_of, tracked_run
from partool.plan.types import Plan
from partool.planner.rules.telemetry import resolve_telemetry
from partool.spec.launch import LaunchSpec
from partool.spec.loader import load_text
from partool.spec.telemetry import TelemetrySpec, TrackerSpec

BASE = "model: gpt2\ndata: python-stdlib\n"


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        ("telemetry: {trackers: [wandb, {name: wandb}]}", "PT247", "wandb is listed twice"),
        ("telemetry: {trackers: [{name: mlflow, uri: mlruns}]}", "PT248", "begin it with sqlite:///"),
        ("telemetry: {trackers: [{name: tensorboard, uri: 'https://a.b'}]}", "PT248", "write the path of a folder"),
        ("telemetry: {trackers: [{name: mlflow, uri: 'https://me:secretword@a.b'}]}", "PT520", "launch.secrets"),
        ("telemetry: {trackers: [aim]}", "PT105", "wandb"),
        ("launch: {tensorboard: true}", "PT101", "write `telemetry: {trackers: [tensorboard]}`"),
        ("launch: {notify: {}}", "PT249", "webhook_env: VARIABLE"),
        ("launch: {notify: {command: [a], webhook_env: B}}", "PT249", "write one of"),
        ("launch: {notify: {webhook: 'https://hooks.slack.com/services/T0/B0/x'}}", "PT520", "webhook_env"),
    ],
)
def test_mistakes(lines: str, code: str, words: str) -> None:
    findings = load_text(BASE + lines + "\n").diagnostics
    found = [finding for finding in findings if finding.severity == "error"]
    assert [finding.code for finding in found] == [code]
    assert words in f"{found[0].message} {found[0].help}"
    assert "secretword" not in found[0].message


def test_bare_names_sections_and_paths() -> None:
    text = "telemetry: {trackers: [wandb, {name: mlflow, uri: 'sqlite:///a/b.db'}, {name: trackio, uri: c}]}\n"
    spec = load_text(BASE + text).spec
    assert spec is not None
    resolved = resolve_telemetry(spec.telemetry, Path("/specs"))
    assert [(each.name, each.uri) for each in resolved.trackers] == [
        ("wandb", None),
        ("mlflow", "sqlite:////specs/a/b.db"),
        ("trackio", "/specs/c"),
    ]


@pytest.mark.parametrize(("old", "trackers"), [(True, ["tensorboard"]), (False, [])])
def test_plans_with_the_key_before_are_read(old: bool, trackers: list[str], tmp_path: Path) -> None:
    document = json.loads(small_plan().to_json())
    del document["telemetry"], document["launch"]["notify"]
    document["launch"]["tensorboard"] = old
    document["spec"] = {"launch": {"tensorboard": old}}
    plan = Plan.from_json(json.dumps(document))
    assert [each.name for each in plan.telemetry.trackers] == trackers
    assert "tensorboard" not in plan.spec["launch"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert outline(tmp_path / "plan.json").launch == LaunchSpec()


def test_a_run_is_told_without_launch_and_environment(tmp_path: Path) -> None:
    launch = LaunchSpec(env={"SOME": "variable"})
    telemetry = TelemetrySpec(trackers=[TrackerSpec(name="wandb")], project="p", group="g", tags=["t"])
    plan = small_plan(launch=launch, telemetry=telemetry)
    in_store, elsewhere = tmp_path / "runs" / "small-1", tmp_path / "small-1"
    told = json.loads(tracked_run(plan, in_store, telemetry.trackers[0]))
    names = {"run_id": "small-1", "name": "small-1", "project": "p", "group": "g", "tags": ["t"], "uri": None}
    assert names.items() <= told.items()
    assert "variable" not in json.dumps(told)
    other = json.loads(tracked_run(plan, elsewhere, telemetry.trackers[0]))["run_id"]
    assert other.startswith("small-1-"), "folders of one name outside of a store are other runs"
    config = outline_of(plan)
    assert config["training"]["steps"] == 12
    assert config["layout"]["micro_batch"] == 2
    assert config["optimizer"]["lr"] == plan.optimizer.lr

"""``partool doctor`` on this machine."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from launch_helpers import make_plan
from test_launch_commands import invoke

from partool.catalog.machine import Machine
from partool.launch import doctor
from partool.spec.telemetry import TelemetrySpec, TrackerSpec


def verdicts(*arguments: str) -> dict[str, tuple[str, str]]:
    answer = invoke("doctor", *arguments, "--output", "json")
    return {check["name"]: (check["verdict"], check["text"]) for check in json.loads(answer.stdout)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", "home")


def test_a_machine_that_can_train() -> None:
    found = verdicts()
    assert found["torch"] == ("ok", importlib.metadata.version("torch"))
    assert found["kernels"][0] == "ok"
    assert found["runs"][1].startswith(str(Path("home/runs").absolute()))
    text = invoke("doctor")
    assert text.exit_code == 0
    assert text.stdout.splitlines()[0].startswith("ok      partool: ")


def test_no_torch_and_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.9.1+cu126")
    assert verdicts()["torch"] == ("failed", "2.9.1+cu126 is older than 2.11")
    found = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    answer = invoke("doctor")
    assert answer.exit_code == 3
    assert "FAILED  torch: not installed" in answer.stdout
    assert "help: pip install 'partool[train]'" in answer.stdout


def test_the_plans_machine_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ranks=8)
    gpus = plan.devices.model_copy(update={"accelerator": "h100-sxm", "backend": "cuda"})
    Path("plan.json").write_text(plan.model_copy(update={"devices": gpus}).to_json())
    answer = invoke("doctor", "plan.json")
    assert answer.exit_code == 3
    assert "the plan wants 8 x h100-sxm; here is no accelerator" in answer.stdout
    monkeypatch.setattr(doctor, "this_machine", lambda: Machine("h100-sxm", 8, 64, 1 << 40))
    assert invoke("doctor", "plan.json").exit_code == 0
    Path("plan.json").write_text(make_plan(ranks=512).to_json())
    assert "warning plan: 512 ranks share" in invoke("doctor", "plan.json").stdout


def test_packages_that_a_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    assert verdicts()["tensorboard"][0] == "skipped"
    telemetry = TelemetrySpec(trackers=[TrackerSpec(name="tensorboard")])
    Path("plan.json").write_text(make_plan().model_copy(update={"telemetry": telemetry}).to_json())
    assert verdicts("plan.json")["tensorboard"][0] == "failed"
    answer = invoke("doctor", "plan.json")
    assert answer.exit_code == 3
    assert "pip install 'partool[tensorboard]'" in answer.stdout


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert verdicts()["runs"][0] == "failed"
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 64 << 20, "free": 1 << 40})
    )
    assert verdicts()["shared memory"][0] == "warning"


def test_a_file_that_is_not_there() -> None:
    answer = invoke("doctor", "job.sh")
    assert answer.exit_code == 1
    assert "job.sh cannot be read" in answer.stderr

"""``partool report --to``: what the tracker's process is told, and how its failures are reported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from _telemetry import small_plan
from typer.testing import CliRunner

from partool.cli import report
from partool.plan.run import RunStatus, write_status
from partool.spec.telemetry import TelemetrySpec, TrackerSpec
from partool.spec.training import TrainingSpec


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "tiny-20260101-000000-abcd"
    folder.mkdir(parents=True)
    write_status(folder, RunStatus(state="done", created=1.0))
    trackers = [TrackerSpec(name="tensorboard", uri="/boards")]
    training = TrainingSpec(sequence_length=10, global_batch=2, steps=3, precision="fp32")
    plan = small_plan(telemetry=TelemetrySpec(trackers=trackers), training=training)
    (folder / "plan.json").write_text(plan.to_json())
    return folder


def call(monkeypatch: pytest.MonkeyPatch, code: int, answers: bytes, *arguments: str) -> tuple[Any, list[Any]]:
    started: list[Any] = []

    def start(line: list[str], input: bytes, **_: Any) -> SimpleNamespace:
        started.append((line[1:], input.decode().splitlines()))
        return SimpleNamespace(returncode=code, stdout=answers)

    monkeypatch.setattr(subprocess, "run", start)
    app = typer.Typer()
    app.command()(report.command)
    return CliRunner().invoke(app, arguments), started


def test_what_the_process_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, started = call(monkeypatch, 0, b'{"url": "/boards/tiny"}\n', "tiny", "--to", "tensorboard")
    assert result.exit_code == 0, result.output
    ((line, (told, end)),) = started
    assert line == ["-P", "-m", "partool_runtime.trackers"]
    assert end == "end", "there is no limit"
    wanted = {"run_id": run.name, "run_dir": str(run), "tracker": "tensorboard", "uri": "/boards"}
    assert wanted.items() <= json.loads(told).items()
    assert f"tensorboard has the figures of {run.name}: /boards/tiny" in result.output


@pytest.mark.usefixtures("run")
def test_a_failure_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = call(monkeypatch, 1, b'{"problem": "OSError: no room"}\n', "tiny", "--to", "tensorboard")
    assert result.exit_code == 3
    assert "PT557" in result.output
    assert "OSError: no room" in result.output
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result, started = call(monkeypatch, 0, b"", "tiny", "--to", "wandb")
    assert (result.exit_code, started) == (3, [])
    assert "pip install 'partool[wandb]'" in result.output

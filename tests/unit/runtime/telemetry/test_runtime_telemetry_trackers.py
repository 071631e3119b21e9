"""Trackers of a recorder: none of them slows, ends or fails a run, whatever it does."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from _telemetry import small_plan
from rich.console import Console

from partool.launch import upload
from partool.plan.event_log import event_log, read_events
from partool.plan.run import process_start
from partool.plan.types import Plan
from partool.spec.telemetry import TelemetrySpec, TrackerSpec
from partool.strategies.trackers import TRACKERS, TrackerRecord
from partool_runtime.errors import ConfigurationError
from partool_runtime.telemetry import Recorder, _trackers
from partool_runtime.telemetry._console import ConsoleLines

FAKES = Path(__file__).parents[1] / "trackers"
STEPS = 6


class Case:
    """Runs whose plan names fake trackers under the names of real ones."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, **fakes: str) -> None:
        self.run_dir = run_dir
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        monkeypatch.setenv("WANDB_API_KEY", "feedface")
        for name, run in fakes.items():
            keys = ("WANDB_API_KEY",)
            monkeypatch.setitem(TRACKERS, name, TrackerRecord(name, "json", run, "a folder", keys=keys))
        self.plan: Plan = small_plan(
            steps=STEPS, log_every=2, telemetry=TelemetrySpec(trackers=[TrackerSpec(name=name) for name in fakes])
        )

    def train(self, wait: Any = None, exit_code: int = 0) -> float:
        """Record some steps, after ``wait()``; return the seconds that the end took."""
        display = ConsoleLines(STEPS, Console(file=StringIO(), width=100))
        recorder = Recorder(self.plan, self.run_dir, rank=0, world_size=1, device=torch.device("cpu"), display=display)
        recorder.event("start", attempt=1, world_size=1, plan_hash="", resumed_from=0)
        for step in range(1, STEPS + 1):
            recorder.step(step, 1.0 / step, tokens=8)
        if wait is not None:
            assert wait()
        began = time.monotonic()
        recorder.close(exit_code)
        return time.monotonic() - began

    def warnings(self) -> list[str]:
        events = read_events(event_log(self.run_dir, 0))
        texts = [event["data"]["message"] for event in events if event["kind"] == "warning"]
        return [text for text in texts if text.startswith("PT5")]

    def told(self) -> list[dict[str, Any]]:
        file = self.run_dir / "told"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def within(seconds: float, is_so: Any) -> bool:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(is_so())


LOG_STEPS = [{"step": step, "train/loss": pytest.approx(1 / step)} for step in (1, 2, 4, 6)]


@pytest.mark.timeout(120)
def test_a_tracker_that_raises_is_switched_off_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, monkeypatch, wandb="_fake_trackers:Raises", mlflow="_fake_trackers:Writes")
    monkeypatch.setattr(_trackers, "END_S", 60)  # a busy machine
    case.train(wait=lambda: within(60, lambda: any("step" in one for one in case.told())), exit_code=75)
    (warning,) = case.warnings()
    assert warning.startswith("PT557: wandb was switched off: RuntimeError: the key *** is wrong; ")
    assert "feedface" not in warning
    rows = [one for one in case.told() if "step" in one]
    assert [{name: row[name] for name in ("step", "train/loss")} for row in rows] == LOG_STEPS
    assert {"close": 75} in case.told()
    (tmp_path / "told").unlink()
    monkeypatch.setitem(TRACKERS, "wandb", TRACKERS["mlflow"])
    assert upload.upload(tmp_path, case.plan, "wandb").startswith("https://example.com/")
    assert [row["step"] for row in case.told() if "step" in row] == [1, 2, 4, 6]
    assert upload.upload(tmp_path, case.plan, "wandb") == "", "it has all of them"


@pytest.mark.timeout(120)
def test_trackers_that_hang_delay_the_end_by_seconds_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = {"wandb": "_hangs_in_import:Any", "mlflow": "_fake_trackers:HangsInOpen"}
    hanging |= {"trackio": "_fake_trackers:HangsInLog", "tensorboard": "_fake_trackers:HangsInClose"}
    case = Case(tmp_path, monkeypatch, **hanging)
    assert _trackers.END_S == 5
    monkeypatch.setattr(_trackers, "END_S", 2)
    begun = lambda: sum("begin" in one for one in case.told()) == 2  # noqa: E731 - log and close
    assert case.train(wait=lambda: within(60, begun)) < 30, "each would hang for ten minutes"
    assert sorted(warning.split()[1] for warning in case.warnings()) == sorted(hanging)
    assert all(warning.startswith("PT558") for warning in case.warnings())
    for child in [one["child"] for one in case.told() if "child" in one]:
        assert within(10, lambda child=child: process_start(child) is None), "it has outlived its tracker"


def test_a_missing_package_is_a_configuration_error_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, monkeypatch, wandb="_fake_trackers:Writes")
    missing = TrackerRecord("W&B", "no_such_package", "_fake_trackers:Writes", "a folder")
    monkeypatch.setitem(TRACKERS, "wandb", missing)
    with pytest.raises(ConfigurationError, match="pip install 'partool\\[wandb\\]'") as caught:
        case.train()
    assert caught.value.code == "PT540"
    Recorder(case.plan, tmp_path, rank=1, world_size=2, device=torch.device("cpu")).close(1)

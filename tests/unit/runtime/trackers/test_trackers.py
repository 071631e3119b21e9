"""Each tracker, in its own process, has the figures of the event log: three attempts, of which later ones repeat steps.

A package is looked for in a folder of its own, ``PARTOOL_TRACKERS``/NAME (default ``build/trackers``, which
``make trackers`` fills), since the trackers ask for other versions of the same packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _telemetry import small_plan

from partool.plan.tracking import tracked_run
from partool.process import python_command
from partool.spec.telemetry import TelemetrySpec, TrackerSpec
from partool.strategies.trackers import TRACKERS

ROOT = Path(__file__).parents[4]
FOLDER = Path(os.environ.get("PARTOOL_TRACKERS", ROOT / "build" / "trackers"))
READER = Path(__file__).parent / "_read_tracker.py"
KEY = "feedfacefeedfacefeedfacefeedfacefeedface"
ATTEMPTS = ((0, 5), (3, 9), (6, 11))
"""Steps that each attempt has resumed from, and its last one."""
VALIDATED = 4


def environment(name: str, run_dir: Path) -> dict[str, str]:
    """Return the environment of a tracker's processes, with a key in each variable that it reads."""
    keys = {variable: KEY for record in TRACKERS.values() for variable in record.keys}
    places = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(run_dir / "trackio"), "PYTHONPATH": str(FOLDER / name)}
    gone = {"WANDB_DIR", "MLFLOW_TRACKING_URI"}
    return {key: value for key, value in os.environ.items() if key not in gone} | keys | places


class Log:
    """The event log of rank 0, as an attempt writes it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "events" / "rank-0.jsonl"
        self.path.parent.mkdir(parents=True)
        self.figures: dict[str, dict[int, float]] = {}
        self._random = random.Random(7)

    def write(self, kind: str, **data: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"v": 1, "kind": kind, "t": time.time(), "rank": 0, "data": data}) + "\n")

    def attempt(self, number: int, first: int, last: int) -> None:
        self.write("start", attempt=number, world_size=2 if number == 3 else 1, plan_hash="", resumed_from=first)
        for step in range(first + 1, last + 1):
            loss = self._random.lognormvariate(0, 3)
            self.figures.setdefault("train/loss", {})[step] = loss
            time.sleep(0.002)  # MLflow tells points apart by milliseconds
            self.write("step", step=step, loss=loss, tokens=8, step_time_s=0.1, tokens_per_s=80.0, mfu=None)
            if step % VALIDATED == 0:
                loss = self._random.random()
                self.figures.setdefault("validation/loss", {})[step] = loss
                self.write("validation", step=step, loss=loss, tokens=8)
        self.write("step", step=last + 1, loss=9.0, tokens=8, step_time_s=0.1)  # no log step
        self.write("end", step=last, exit_code=0 if number == len(ATTEMPTS) else 75, reason="")


def follow(run_dir: Path, name: str, project: str = "tests") -> list[dict[str, str]]:
    telemetry = TelemetrySpec(trackers=[TrackerSpec(name=name)], project=project, group="g", tags=["a", "b c"])
    told = tracked_run(small_plan(telemetry=telemetry), run_dir, telemetry.trackers[0])
    ended = subprocess.run(
        python_command("partool_runtime.trackers"),
        input=f"{told}\nend\n",
        env=environment(name, run_dir),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def stored(run_dir: Path, name: str) -> dict[str, Any]:
    command = [sys.executable, str(READER), name, str(run_dir)]
    read: dict[str, Any] = json.loads(subprocess.check_output(command, env=environment(name, run_dir)))
    return read


def require(name: str) -> None:
    if not (FOLDER / name / name).is_dir() and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is neither installed nor in {FOLDER / name}: make trackers")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.long) for each in TRACKERS])
def test_a_tracker_has_the_figures_of_three_attempts(name: str, tmp_path: Path) -> None:
    require(name)
    run_dir = tmp_path / "runs" / "small-1"
    log = Log(run_dir)
    for number, (first, last) in enumerate(ATTEMPTS, 1):
        log.attempt(number, first, last)
        follow(run_dir, name)
    assert follow(run_dir, name) == [], "nothing is sent twice"
    found = stored(run_dir, name)
    assert found["runs"] == 1
    kind = np.float32 if name == "tensorboard" else np.float64
    for figure, points in log.figures.items():
        latest = {int(step): values[-1] for step, values in found["figures"][figure].items()}
        assert latest == {step: float(kind(value)) for step, value in points.items()}, figure
    leaks = [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert leaks == []

"""Step time of partool's trainer against a bare hand-written FSDP2 loop of the same model; runs alternate.

The spec is specs/quickstart.yaml under ZeRO-3, which the bare loop also uses. The trainer's figure is the median
interval between the step events of rank 0: data, logging and telemetry included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _record import write

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STEPS = 60
ROUNDS = 5
WARMUP_STEPS = 5
OVERRIDES = {
    "training.steps": STEPS,
    "training.log_every": 10,
    "training.validation.every": 0,
    "training.validation.samples": 2,
    "checkpoint.every": 0,
    "parallel.data.zero": 3,
    "parallel.recompute": "none",
    "parallel.compile": "none",
}


def make_plan(folder: Path) -> Path:
    """Write the plan that both loops run."""
    path = folder / "plan.json"
    sets = [f"--set={key}={value}" for key, value in OVERRIDES.items()]
    subprocess.run(
        [BIN / "partool", "plan", "specs/quickstart.yaml", *sets, "--out", path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return path


def bare_s(plan: Path) -> float:
    """Run the hand-written loop once; return its median step time in seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "tests/bench/bare_fsdp2.py"), str(plan)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["median_s"])


def trainer_s(plan: Path, folder: Path) -> float:
    """Run the trainer once; return the median interval between its steps in seconds."""
    subprocess.run([BIN / "partool", "launch", plan], cwd=folder, check=True, capture_output=True)
    (log,) = folder.glob(".partool/runs/*/events/rank-0.jsonl")
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [event["data"]["step_time_s"] for event in events if event["kind"] == "step"]
    return statistics.median(steps[WARMUP_STEPS:])


def main() -> None:
    """Measure in alternation and write the ratio."""
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as name:
        plan = make_plan(Path(name))
        for index in range(ROUNDS):
            bare.append(bare_s(plan))
            folder = Path(name) / str(index)
            folder.mkdir()
            ours.append(trainer_s(plan, folder))
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    result = {
        "rounds": ROUNDS,
        "steps": STEPS,
        "bare_fsdp2_s": bare,
        "partool_s": ours,
        "ratio_median": statistics.median(ratios),
        "ratio_of_medians": statistics.median(ours) / statistics.median(bare),
        "goal_ratio": 1.03,
    }
    write("trainer_overhead", result, "torch")


if __name__ == "__main__":
    main()

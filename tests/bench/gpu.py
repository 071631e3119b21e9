"""One GPU: correctness of results, speed of the trainer against a bare FSDP2 loop, and accuracy of the predictions.

Correctness comes first; a failure ends the script. Speed is measured in alternation, eager and compiled.
Without a GPU the script says so and exits with code 2.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensor
import torch
from _record import write

ROOT = Path(__file__).parents[2]
WARMUP_STEPS = 5
ROUNDS = 2
TENSOR_ROUNDS = 20
SHORT = {"training.steps": 20, "training.validation.every": 0, "training.validation.samples": 2, "checkpoint.every": 10}
QUIET = SHORT | {"training.steps": 30, "checkpoint.every": 0, "parallel.data.zero": 3, "parallel.recompute": "none"}
SPEED = QUIET | {"model": "gpt2", "training.sequence_length": 1024, "training.global_batch": 32}
POLICIES = ("none", "full")
SIZES = ("gpt2", "gpt2-xl", "llama3.2-1b")
LIMITS = {"fp64": 1e-9, "fp32": 1e-3, "compile": 1e-3, "bf16": 5e-2}
"""Largest relative difference of a step's loss from that of the CPU in float64."""
NOT_ALLOCATED = ("framework", "fragmentation")
"""Terms of predicted memory that torch's allocator does not count as allocated."""

Losses = dict[int, float]


def partool(*arguments: str | Path, folder: Path) -> None:
    """Run a partool command in ``folder``; its output is shown if it fails."""
    command = [sys.executable, "-c", "from partool.cli.main import run; run()", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def make_plan(folder: Path, settings: Mapping[str, object]) -> Path:
    """Plan the quickstart with ``settings`` for one device of this machine, in a folder of its own."""
    folder.mkdir(parents=True)
    sets = {"hardware.accelerator": "auto", "hardware.per_node": 1} | dict(settings)
    arguments = [f"--set={key}={value}" for key, value in sets.items()]
    partool("plan", ROOT / "specs/quickstart.yaml", *arguments, "--out", folder / "plan.json", folder=folder)
    return folder / "plan.json"


def steps_of(lines: list[str]) -> list[dict[str, Any]]:
    """Return the step events of an event log."""
    events = [json.loads(line) for line in lines]
    return [event["data"] for event in events if event["kind"] == "step"]


def launch(plan: Path, *options: str) -> list[dict[str, Any]]:
    """Run a plan and return its steps."""
    partool("launch", plan, *options, folder=plan.parent)
    (log,) = plan.parent.glob(".partool/runs/*/events/rank-0.jsonl")
    return steps_of(log.read_text(encoding="utf-8").splitlines())


def losses(steps: list[dict[str, Any]]) -> Losses:
    """Return the loss of each step, from its last execution."""
    return {step["step"]: step["loss"] for step in steps}


def difference(got: Losses, want: Losses) -> float:
    """Return the largest relative difference; infinite if steps are missing or not finite."""
    if got.keys() != want.keys() or not all(map(math.isfinite, got.values())):
        return math.inf
    return max(abs(got[step] - want[step]) / abs(want[step]) for step in want)


def check(folder: Path) -> dict[str, float]:
    """Compare losses with the CPU's, and a resumed run with an uninterrupted one; exits if they differ."""
    eager = SHORT | {"parallel.compile": "none"}
    on_cpu = {"hardware.accelerator": "cpu", "training.precision": "fp64"}
    want = losses(launch(make_plan(folder / "cpu", eager | on_cpu)))
    cases: dict[str, dict[str, object]] = {name: {"training.precision": name} for name in ("fp64", "fp32", "bf16")}
    cases["compile"] = {"training.precision": "fp32", "parallel.compile": "block"}
    found = {}
    for name, settings in cases.items():
        found[name] = difference(losses(launch(make_plan(folder / name, eager | settings))), want)
        print(f"{name}: largest relative difference of a loss {found[name]:.2g}, limit {LIMITS[name]:.0e}", flush=True)
    exact = {"training.precision": "bf16", "training.deterministic": "true"}
    plan = make_plan(folder / "resume", eager | exact)
    whole = losses(launch(plan))
    (last,) = plan.parent.glob(".partool/runs/*/checkpoints/step-*20")
    shutil.rmtree(last)
    found["resume"] = difference(losses(launch(plan, "--resume")), whole)
    bad = [name for name, value in found.items() if value > LIMITS.get(name, 0.0)]
    if bad:
        sys.exit(f"wrong on this GPU: {', '.join(bad)}; differences {found}")
    return found


def bare_s(plan: Path) -> float:
    """Run the hand-written loop once; return its median step time in seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [str(ROOT / "tests/bench/bare_fsdp2.py"), str(plan)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["median_s"])


def speed(folder: Path, compiled: str) -> dict[str, Any]:
    """Measure trainer and bare loop in alternation."""
    ours, bare = [], []
    for index in range(ROUNDS):
        plan = make_plan(folder / f"{compiled}-{index}", SPEED | {"parallel.compile": compiled})
        bare.append(bare_s(plan))
        ours.append(statistics.median(step["step_time_s"] for step in launch(plan)[WARMUP_STEPS:]))
    text = json.loads(plan.read_text(encoding="utf-8"))
    seconds = statistics.median(ours)
    return {
        "partool_s": ours,
        "bare_fsdp2_s": bare,
        "ratio_of_medians": seconds / statistics.median(bare),
        "tokens_per_s": text["training"]["global_batch"] * text["training"]["sequence_length"] / seconds,
        "mfu": text["prediction"]["time"]["model_flops"] / seconds / text["devices"]["peak_flops"],
        "predicted_s": text["prediction"]["time"]["step_time_s"],
    }


def calibrate(folder: Path) -> Path:
    """Calibrate on this machine; return the profile that later plans use."""
    folder.mkdir(parents=True)
    partool("calibrate", "--quick", "--ranks", "1", "--out", folder / "profile.json", folder=folder)
    return folder / "profile.json"


def prediction(folder: Path, model: str, recompute: str, profile: Path) -> dict[str, float]:
    """Return predicted and measured allocator peak and step time, with the catalog's and with calibrated figures."""
    settings = SPEED | {"model": model, "training.steps": 12, "training.log_every": 1, "parallel.compile": "none"}
    settings = settings | {"parallel.recompute": recompute}
    plan = make_plan(folder / f"{model}-{recompute}", settings)
    steps = launch(plan)
    peak = max(step["memory_bytes"] for step in steps if step.get("memory_bytes"))
    seconds = statistics.median(step["step_time_s"] for step in steps[WARMUP_STEPS:])
    found = predicted(plan)
    terms = found["memory"]["terms_bytes"]
    allocated = sum(size for term, size in terms.items() if term not in NOT_ALLOCATED)
    calibrated = make_plan(folder / f"{model}-{recompute}-calibrated", settings | {"hardware.profile": profile})
    return {
        "predicted_bytes": allocated,
        "measured_bytes": peak,
        "predicted_to_measured_memory": allocated / peak,
        "measured_s": seconds,
        "predicted_to_measured_time": found["time"]["step_time_s"] / seconds,
        "calibrated_to_measured_time": predicted(calibrated)["time"]["step_time_s"] / seconds,
    }


def predicted(plan: Path) -> dict[str, Any]:
    """Return what a plan predicts."""
    found: dict[str, Any] = json.loads(plan.read_text(encoding="utf-8"))["prediction"]
    return found


def tensor_parallel() -> dict[str, Any]:
    """Measure the cost of tensor-rank exchanges on a single rank, which the trainer omits; losses come first."""
    return {
        "losses_apart": tensor.check(tensor.ONE, accelerator="auto", ranks=1),
        "goal_ratio": tensor.ONE_GOAL_RATIO,
        "sizes": [tensor.one(size, TENSOR_ROUNDS, accelerator="auto", precision="bf16") for size in tensor.SIZES],
    }


def main() -> None:
    """Check, measure and write the result."""
    if not torch.cuda.is_available():
        print("tests/bench/gpu.py needs a GPU that torch can use; there is none here", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = calibrate(folder / "calibration")
        result = {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda or torch.version.hip,
            "loss_differences": check(folder / "check"),
            "tensor_of_one_rank": tensor_parallel(),
            "speed": {kind: speed(folder, kind) for kind in ("none", "block")},
            "predictions": {
                f"{model}, recompute {policy}": prediction(folder / "predictions", model, policy, profile)
                for model in SIZES
                for policy in POLICIES
            },
        }
    write("gpu", result, "torch")


if __name__ == "__main__":
    main()

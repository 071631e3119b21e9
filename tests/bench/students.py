"""A teacher with experts, and students with an early stop, with the teacher in all steps, and without one.

The mixture of students of DeepSpeed-MoE (arXiv 2201.05596, section 4.2) in little: byte-level models on two CPU ranks
that share eight experts. Students have an eighth of the layers less than the teacher; every kind has the same steps,
learning rate and data, and several seeds. Results are written as they come out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import write
from overhead import BIN

LAYERS, FEWER, EVERY = 8, 7, 40
SPEC = f"""
spec: 1
name: students
model:
  layers: {LAYERS}
  hidden: 96
  ffn_hidden: 256
  heads: 4
  vocab: 256
  max_position: 128
  moe: {{experts: 8, top_k: 2, ffn_hidden: 128, every: 2, aux_loss: 0.01}}
hardware: {{accelerator: cpu, per_node: 2}}
training:
  sequence_length: 128
  global_batch: 16
  precision: fp32
  log_every: 20
  validation: {{every: {EVERY}, samples: 64}}
optimizer: {{lr: 3.0e-3, schedule: {{kind: cosine, warmup_steps: 20}}, weight_decay: 0.1}}
data: {{source: python-stdlib, validation: 0.01}}
parallel: {{expert: 2, data: {{zero: 1}}, recompute: none, compile: none, micro_batch: 8, tensor: 1, pipeline: 1}}
"""
KINDS: dict[str, dict[str, Any]] = {"none": {}, "early stop": {"until": 0.8}, "full": {"until": None}}
"""Settings of ``training.distill`` of each kind of student; ``none`` has no teacher."""


def run(folder: Path, seed: int, **changes: object) -> tuple[Path, dict[str, Any]]:
    """Train once; return the run's folder, and losses by step, step times and divergences."""
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    sets = [f"--set={path.replace('__', '.')}={value}" for path, value in changes.items()]
    command = [BIN / "partool", "launch", folder / "spec.yaml", *sets, f"--set=training.seed={seed}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (plan_file,) = (folder / ".partool" / "runs").glob("*/plan.json")
    lines = (plan_file.parent / "events" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event["data"] for event in events if event["kind"] == "step"]
    losses = {event["data"]["step"]: event["data"]["loss"] for event in events if event["kind"] == "validation"}
    divergences = {step["step"]: step["kl"] for step in steps if "kl" in step}
    figures = {
        "validation": losses,
        "last_loss": losses[max(losses)],
        "kl": divergences,
        "median_step_s": statistics.median(step["step_time_s"] for step in steps[1:]),
    }
    return plan_file.parent, figures


def student(folder: Path, kind: str, seed: int, teacher: Path, steps: int) -> dict[str, Any]:
    """Train one student and return its figures."""
    changes: dict[str, object] = {"model__layers": FEWER, "training__steps": steps}
    if kind != "none":
        changes["training__distill__teacher"] = teacher
        if KINDS[kind]["until"] is not None:
            changes["training__distill__until"] = KINDS[kind]["until"]
    return run(folder, seed, **changes)[1]


def main() -> None:
    """Train the teacher once and every kind of student with every seed; write all figures and means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=240)
    asked = parser.parse_args()
    students: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder, of_teacher = run(Path(name) / "teacher", 100, training__steps=asked.teacher_steps)
        print("teacher", of_teacher["last_loss"], file=sys.stderr, flush=True)
        for seed in range(asked.seeds):
            for kind, runs in students.items():
                place = Path(name) / f"{kind.replace(' ', '-')}-{seed}"
                runs.append(student(place, kind, seed, folder, asked.steps))
                print(kind, seed, runs[-1]["last_loss"], file=sys.stderr, flush=True)
    means = {kind: statistics.mean(one["last_loss"] for one in runs) for kind, runs in students.items()}
    settings = {"teacher_steps": asked.teacher_steps, "steps": asked.steps, "kinds": KINDS}
    result = {"settings": settings, "teacher": of_teacher, "students": students, "mean_last_loss": means}
    write("students", result, "torch")


if __name__ == "__main__":
    main()

"""Steps and bytes of AdamW, 0/1 Adam, Muon and LAMB until a small model has a given validation loss, for several seeds.

A byte-level model like the quickstart's on two CPU ranks. Each optimizer has the learning rate of a short search.
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

from partool.layout.one_bit import exchange_schedule
from partool.plan.types import Plan

STEPS, EVERY, GOAL = 160, 10, 2.6
SPEC = f"""
spec: 1
name: optimizers
model: {{layers: 3, hidden: 128, ffn_hidden: 344, heads: 4, kv_heads: 4, vocab: 259, max_position: 128}}
hardware: {{accelerator: cpu, per_node: 2}}
training:
  {{sequence_length: 128, global_batch: 16, steps: {STEPS}, precision: fp32, log_every: 1000,
  validation: {{every: {EVERY}, samples: 16}}}}
optimizer: {{schedule: {{kind: cosine, warmup_steps: 10}}, weight_decay: 0.1}}
data: {{source: python-stdlib, validation: 0.01}}
parallel: {{data: {{zero: 0}}, recompute: none, compile: none, micro_batch: 8, tensor: 1, pipeline: {{stages: 1}}}}
"""
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3},
    "zero_one_adam": {"lr": 3e-3},
    "muon": {"lr": 3e-3, "momentum": 0.95, "newton_schulz": "working"},
    "lamb": {"lr": 1e-2},
}
"""Settings of each optimizer; ``working``, as bf16 is slow on CPUs."""


def run(kind: str, seed: int, folder: Path) -> dict[str, float | None]:
    """Train once; return the steps and bytes to the goal, and the last validation loss."""
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    sets = [f"--set=optimizer.{key}={value}" for key, value in {"name": kind, **KINDS[kind]}.items()]
    command = [BIN / "partool", "launch", folder / "spec.yaml", *sets, f"--set=training.seed={seed}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (plan_file,) = (folder / ".partool" / "runs").glob("*/plan.json")
    plan = Plan.from_json(plan_file.read_text(encoding="utf-8"))
    lines = (plan_file.parent / "events" / "rank-0.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {
        event["data"]["step"]: event["data"]["loss"]
        for event in map(json.loads, lines)
        if event["kind"] == "validation"
    }
    reached = next((step for step, loss in sorted(losses.items()) if loss <= GOAL), None)
    return {
        "steps": reached,
        "bytes": None if reached is None else sent_bytes(plan, reached),
        "last_loss": losses[STEPS],
    }


def sent_bytes(plan: Plan, steps: int) -> int:
    """Return the bytes that a rank sends in the first steps."""
    time = plan.prediction.time
    if not time.exchanges:
        return steps * sum(time.traffic_bytes.values())
    schedule = exchange_schedule(plan.optimizer, plan.training, plan.checkpoint, plan.data.validation)
    return sum(time.exchanges[schedule.kind(step)].sent_bytes for step in range(steps))


def main() -> None:
    """Run every optimizer with every seed and write medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    found: dict[str, list[dict[str, float | None]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(asked.seeds):
            for kind, runs in found.items():
                runs.append(run(kind, seed, Path(name) / f"{kind}-{seed}"))
                print(kind, seed, runs[-1], file=sys.stderr, flush=True)
    medians = {
        kind: {
            key: statistics.median(value for one in runs if (value := one[key]) is not None)
            if all(one[key] is not None for one in runs)
            else None
            for key in ("steps", "bytes", "last_loss")
        }
        for kind, runs in found.items()
    }
    result = {"goal_loss": GOAL, "steps": STEPS, "settings": KINDS, "runs": found, "medians": medians}
    write("optimizers", result, "torch")


if __name__ == "__main__":
    main()

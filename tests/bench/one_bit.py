"""Step time of 0/1 Adam over a whole schedule on slow links, against fp32 AdamW (Linux, root, iproute2).

A Llama of 20.6 million parameters in fp32 on four CPU ranks, each behind a link of 100 Mbit/s. AdamW runs few steps,
as each takes as long as the other; 0/1 Adam runs its whole schedule, steps in full precision included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from _pipeline_net import Cables, unavailable
from _record import write
from _start import start_ranks
from overhead import BIN, ROOT

from partool.layout.one_bit import exchange_schedule
from partool.plan.types import Plan

RANKS, RATE_MBIT, STEPS, ADAMW_STEPS = 4, 100.0, 200, 8
SPEC = f"""
spec: 1
name: one-bit
model: {{layers: 8, hidden: 384, ffn_hidden: 1024, heads: 6, kv_heads: 6, vocab: 8192, max_position: 64}}
hardware: {{accelerator: cpu, per_node: {RANKS}}}
training: {{sequence_length: 64, global_batch: {RANKS}, steps: {STEPS}, precision: fp32, log_every: 1000}}
optimizer: {{lr: 3.0e-4, schedule: {{kind: cosine, warmup_steps: 5}}}}
data: {{source: python-stdlib}}
parallel: {{data: {{zero: 0}}, recompute: none, compile: none, micro_batch: 1, tensor: 1, pipeline: {{stages: 1}}}}
limits: {{max_devices: {RANKS}}}
"""


def make_plan(folder: Path, name: str, steps: int) -> Path:
    """Write the plan of an optimizer."""
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    sets = [f"--set=optimizer.name={name}", f"--set=training.steps={steps}"]
    command = [BIN / "partool", "plan", folder / "spec.yaml", *sets, "--out", folder / "plan.json"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "plan.json"


def measure(plan: Path, folder: Path) -> list[float]:
    """Run a plan once over slow links; return the seconds of each step after the first, of the slowest rank."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"kind": "partool", "plan": str(plan)}), encoding="utf-8")
    with Cables(RANKS, RATE_MBIT) as cables:
        start_ranks(
            ROOT / "tests/bench/_data_parallel_rank.py",
            folder,
            RANKS,
            3600.0,
            environment=cables.environment,
            inside=cables.inside,
        )
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    ends = [max(marks[step][0] for marks in ranks) for step in range(len(ranks[0]))]
    return [after - before for before, after in pairwise(ends)]


def main() -> None:
    """Measure in alternation and write means by kind of step, and the ratio of means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="AdamW is measured before and after each round")
    asked = parser.parse_args()
    if reason := unavailable():
        sys.exit(reason)
    adamw: list[float] = []
    runs: list[list[float]] = []
    with tempfile.TemporaryDirectory() as name:
        plans = {
            "adamw": make_plan(Path(name) / "adamw", "adamw", ADAMW_STEPS),
            "bits": make_plan(Path(name) / "bits", "zero_one_adam", STEPS),
        }
        plan = Plan.from_json(plans["bits"].read_text(encoding="utf-8"))
        for number in range(asked.rounds + 1):
            adamw += measure(plans["adamw"], Path(name) / f"adamw {number}")
            print("adamw", statistics.mean(adamw), file=sys.stderr, flush=True)
            if number < asked.rounds:
                runs.append(measure(plans["bits"], Path(name) / f"bits {number}"))
                print("0/1 Adam", statistics.mean(runs[-1]), file=sys.stderr, flush=True)
    schedule = exchange_schedule(plan.optimizer, plan.training, plan.checkpoint, plan.data.validation)
    kinds: dict[str, list[float]] = {}
    for seconds in runs:
        for step, one in enumerate(seconds, start=1):
            kinds.setdefault(schedule.kind(step), []).append(one)
    whole = [one for seconds in runs for one in seconds]
    result: dict[str, Any] = {
        "ranks": RANKS,
        "rate_mbit": RATE_MBIT,
        "parameters": plan.prediction.memory.terms_bytes["parameters"] // 4,
        "steps": {kind: len(found) for kind, found in kinds.items()},
        "mean_s": {kind: statistics.mean(found) for kind, found in kinds.items()},
        "median_s": {kind: statistics.median(found) for kind, found in kinds.items()},
        "sent_bytes": {kind: part.sent_bytes for kind, part in plan.prediction.time.exchanges.items()},
        "adamw_mean_s": statistics.mean(adamw),
        "adamw_steps": len(adamw),
        "one_bit_mean_s": statistics.mean(whole),
        "ratio": statistics.mean(whole) / statistics.mean(adamw),
        "goal_ratio": 0.35,
    }
    write("one_bit", result, "torch")


if __name__ == "__main__":
    main()

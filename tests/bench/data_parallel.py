"""Step and CPU time of data parallelism on two CPU ranks, against DDP, FSDP2 and transformers' Trainer; runs alternate.

A Llama of 18.9 million parameters in fp32, one thread a rank, gloo. CPU seconds are those of both ranks together,
which a busy machine disturbs less. ``--only ddp,partool zero-1`` measures some kinds, ``--rounds 1`` is a quick look.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import write
from _start import start_ranks
from overhead import BIN, ROOT

STEPS, WARMUP_STEPS = 14, 4
SPEC = f"""
spec: 1
name: data-parallel
model: {{layers: 8, hidden: 384, ffn_hidden: 1024, heads: 6, kv_heads: 6, vocab: 6144, max_position: 256}}
hardware: {{accelerator: cpu, per_node: 2}}
training: {{sequence_length: 256, global_batch: 8, steps: {STEPS}, precision: fp32, log_every: 1000}}
optimizer: {{lr: 1.0e-4, schedule: {{kind: constant}}}}
data: {{source: python-stdlib}}
"""
PINNED = {"parallel.recompute": "none", "parallel.compile": "none", "parallel.micro_batch": 4, "parallel.tensor": 1}
KINDS: dict[str, dict[str, object]] = {
    "ddp": PINNED,
    "fsdp2": PINNED,
    "hf-ddp": PINNED,
    "hf-fsdp2": PINNED,
    **{f"partool zero-{stage}": PINNED | {"parallel.data.zero": stage} for stage in range(4)},
    "partool": {},
}
"""Settings of each kind; the last one is the planner's own choice."""


def make_plan(folder: Path, settings: dict[str, object]) -> Path:
    """Write the plan of one kind."""
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    command = [BIN / "partool", "plan", folder / "spec.yaml", *sets, "--out", folder / "plan.json"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "plan.json"


def measure(kind: str, plan: Path, folder: Path) -> dict[str, float]:
    """Run one kind once; return the mean seconds of a step, wall and CPU of both ranks."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"kind": kind, "plan": str(plan)}), encoding="utf-8")
    start_ranks(ROOT / "tests/bench/_data_parallel_rank.py", folder, 2, 300.0)
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    wall, cpu = (
        [(marks[-1][clock] - marks[WARMUP_STEPS][clock]) / (STEPS - WARMUP_STEPS - 1) for marks in ranks]
        for clock in (0, 1)
    )
    return {"step_s": max(wall), "cpu_s": sum(cpu)}


def main() -> None:
    """Measure in alternation and write medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(KINDS))
    asked = parser.parse_args()
    kinds = [kind.strip() for kind in asked.only.split(",")]
    whole = kinds == list(KINDS)
    if importlib.util.find_spec("accelerate") is None:  # needed by transformers' Trainer
        print("accelerate is not installed: without transformers' Trainer", file=sys.stderr)
        kinds = [kind for kind in kinds if not kind.startswith("hf")]
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        plans = {kind: make_plan(Path(name) / "plans" / kind, KINDS[kind]) for kind in kinds}
        for round_ in range(asked.rounds):
            for kind in kinds:
                found[kind].append(measure(kind, plans[kind], Path(name) / str(round_) / kind))
                print(kind, found[kind][-1], file=sys.stderr, flush=True)
    medians = {
        kind: {clock: statistics.median(one[clock] for one in runs) for clock in ("step_s", "cpu_s")}
        for kind, runs in found.items()
    }
    result: dict[str, Any] = {"rounds": asked.rounds, "steps": STEPS, "medians": medians, "goal_ratio": 1.0}
    for peer in ("ddp", "hf-fsdp2"):
        if peer in found:
            result[f"over {peer}"] = {
                kind: {
                    clock: statistics.median(a[clock] / b[clock] for a, b in zip(runs, found[peer], strict=True))
                    for clock in ("step_s", "cpu_s")
                }
                for kind, runs in found.items()
            }
    if whole:
        write("data_parallel", result, "torch", *(["transformers", "accelerate"] if "hf-ddp" in kinds else []))
    else:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

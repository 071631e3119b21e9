"""Wall time and peak memory of whole ``partool plan`` commands over the full space, each in a fresh process.

Goals: 70B on 1,024 H100s in 2 s and 405B on 16,384 in 5 s on one core, 300 MB of resident memory.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import write

ROOT = Path(__file__).parents[2]
PARTOOL = Path(sys.executable).parent / "partool"
ROUNDS = 5
LLAMA_405B = (
    "{layers: 126, hidden: 16384, ffn_hidden: 53248, heads: 128, kv_heads: 8, vocab: 128256, max_position: 131072}"
)
CASES: dict[str, tuple[str, int, int, float]] = {
    "70b_1024": ("llama3-70b", 128, 1024, 2.0),
    "405b_16384": (LLAMA_405B, 2048, 2048, 5.0),
}
"""Model, nodes of 8 H100s, sequences per step, and the goal in seconds."""
RSS_GOAL_BYTES = 300e6


def spec_text(model: str, nodes: int, batch: int) -> str:
    """Return a spec that leaves the whole layout open."""
    return (
        f"model: {model}\nhardware: {{accelerator: h100-sxm, nodes: {nodes}}}\ndata: python-stdlib\n"
        f"training: {{sequence_length: 8192, global_batch: {batch}, steps: 100000}}\n"
    )


def measure(spec: Path) -> tuple[float, int, dict[str, Any]]:
    """Return wall seconds, peak resident bytes and the plan of one cold command on one core."""
    program = (
        "import json, resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=True)\n"
        "print(json.dumps([resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, done.stdout]))\n"
    )
    command = [sys.executable, "-c", program, str(PARTOOL), "plan", str(spec), "--output", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    core = min(os.sched_getaffinity(0))
    start = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    wall = time.perf_counter() - start
    peak, text = json.loads(done.stdout)
    return wall, peak, json.loads(text)


def main() -> None:
    """Measure and write the result."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, nodes, batch, goal) in CASES.items():
            spec = Path(folder) / f"{name}.yaml"
            spec.write_text(spec_text(model, nodes, batch), encoding="utf-8")
            runs = [measure(spec) for _ in range(ROUNDS)]
            results[name] = {
                "median_s": statistics.median(run[0] for run in runs),
                "max_s": max(run[0] for run in runs),
                "peak_rss_bytes": max(run[1] for run in runs),
                "goal_s": goal,
                "goal_rss_bytes": RSS_GOAL_BYTES,
                "search": {key: value for key, value in runs[0][2]["search"].items() if key != "pruned"},
            }
            print(name, results[name])
    write(
        "plan_time",
        {"rounds": ROUNDS, "cases": results, "rss_self": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss},
    )


if __name__ == "__main__":
    main()

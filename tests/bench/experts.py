"""Layers of experts measured: against DeepSpeed's layer on two ranks, and against transformers' Mixtral on one rank.

``python tests/bench/experts.py --deepspeed FOLDER`` takes about four minutes; ``--quick`` checks in one that everything
works, and writes nothing. The folder holds DeepSpeed's packages: ``DS_BUILD_OPS=0 pip install --no-build-isolation
--target FOLDER --no-deps deepspeed hjson py-cpuinfo msgpack einops psutil``. All sides have the same experts, tokens
and routing, drop no token, and run in turn in the same processes: forward, backward, no optimizer. Results and all
gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _experts_job import Job, Shape
from _record import write
from _start import start_ranks

RANK = Path(__file__).with_name("_experts_rank.py")
ALLOCATOR = Path(__file__).parents[1] / "parity" / "_counting_allocator.cpp"
WIDE, FINE = Shape(8, 512, 1024, 1024), Shape(32, 512, 256, 1024)
CASES = {
    "two ranks, 8 wide experts": Job(WIDE, ("partool", "deepspeed"), ranks=2),
    "two ranks, 8 wide experts, 4 : 1": Job(WIDE, ("partool", "deepspeed"), ranks=2, skewed=True),
    "two ranks, 32 narrow experts": Job(FINE, ("partool", "deepspeed"), ranks=2),
    "one rank, 8 wide experts": Job(WIDE, ("partool", "transformers", "transformers grouped"), ranks=1),
    "one rank, 8 wide experts, 4 : 1": Job(
        WIDE, ("partool", "transformers", "transformers grouped"), ranks=1, skewed=True
    ),
    "one rank, 32 narrow experts": Job(FINE, ("partool", "transformers", "transformers grouped"), ranks=1),
}
GOAL_RATIO = 1.0
TOLERANCE = 2e-5
"""Largest difference of results and gradients from partool's, relative to their largest value, in float32."""


def run(job: Job) -> list[dict[str, Any]]:
    """Run a job's ranks; return one record per side, of the slowest or fullest rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        start_ranks(RANK, folder, job.ranks, 600, environment={"DS_ACCELERATOR": "cpu"})
        records = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(job.ranks)]
    found = []
    for at, side in enumerate(job.sides):
        of_ranks = [record[at] for record in records]
        found.append({
            "side": side,
            "step_s": [max(each) for each in zip(*(record["step_s"] for record in of_ranks), strict=True)],
            "cpu_s": [sum(each) for each in zip(*(record["cpu_s"] for record in of_ranks), strict=True)],
            "peak_bytes": max(record["peak_bytes"] for record in of_ranks),
            "apart": max(record["apart"] for record in of_ranks),
            "imbalance": of_ranks[0]["imbalance"],
        })  # fmt: skip
    return found


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, and partool's ratios to each other side; exits if sides compute different things."""
    ours = found[0]
    for each in found:
        if each["apart"] > TOLERANCE:
            sys.exit(f"{each['side']} computes something else: {each['apart']}")
    sides, ratios = [], {}
    for each in found:
        medians = {key: statistics.median(each[f"{key}_s"]) for key in ("step", "cpu")}
        sides.append({
            "side": each["side"],
            "median_step_s": medians["step"],
            "median_cpu_s": medians["cpu"],
            "peak_bytes": each["peak_bytes"],
            "apart": each["apart"],
            "steps": len(each["step_s"]),
        })  # fmt: skip
        if each is not ours:
            ratios[each["side"]] = {
                "step": _ratio(ours["step_s"], each["step_s"]),
                "cpu": _ratio(ours["cpu_s"], each["cpu_s"]),
                "peak_bytes": ours["peak_bytes"] / each["peak_bytes"],
            }
    return {"imbalance": ours["imbalance"], "sides": sides, "ratios": ratios}


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def compiled(folder: Path) -> str:
    """Compile the allocator that counts; return the path of its library."""
    made, torch_folder = folder / "counting.so", Path(torch.__file__).parent
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(ALLOCATOR)]
    subprocess.run([*command, f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(made)], check=True, timeout=100)
    return str(made)


def main() -> None:
    """Measure, print, and write the results."""
    reader = argparse.ArgumentParser(description="Layers of experts measured.")
    reader.add_argument("--quick", action="store_true", help="few steps of everything; nothing is written")
    reader.add_argument("--only", default="", help="part of the names of the cases to measure; nothing is written")
    reader.add_argument("--deepspeed", required=True, help="folder with DeepSpeed's packages")
    options = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended
    result: dict[str, Any] = {"goal_ratio": GOAL_RATIO, "cases": {}}
    with tempfile.TemporaryDirectory() as name:
        library = compiled(Path(name))
        for title, job in CASES.items():
            if options.only in title:
                made = dataclasses.replace(
                    job, rounds=2 if options.quick else 21, library=library, extra_path=options.deepspeed
                )
                result["cases"][title] = {"shape": dataclasses.asdict(job.shape)} | summary(run(made))
                print(title, json.dumps(result["cases"][title]["ratios"]), file=sys.stderr, flush=True)
    if not options.quick and not options.only:
        (version,) = Path(options.deepspeed).glob("deepspeed-*.dist-info")
        result["deepspeed"] = version.name.split("-")[1].removesuffix(".dist")
        write("experts", result, "torch", "transformers")


if __name__ == "__main__":
    main()

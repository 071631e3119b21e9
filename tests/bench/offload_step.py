"""Whole training steps on this machine's processors: the optimizer in host memory against DeepSpeed and no offload.

On a CPU the same engine runs with threads in place of a device's streams, so nothing can overlap. The benchmark
measures the engine's own cost, next to DeepSpeed's CPU Adam with its ZeRO-Offload around the same model, on equal work:
bf16 weights and gradients, fp32 masters and moments, clipping on. First, bits are compared with a hand-written loop.

    DS_BUILD_OPS=0 pip install --no-build-isolation --target /tmp/ds --no-deps deepspeed hjson py-cpuinfo msgpack einops
    python tests/bench/offload_step.py --deepspeed /tmp/ds
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from _offload_job import ALWAYS, NEVER, SideName, Steps
from _offload_talk import Bench, compare_bits, in_turn
from _record import write

CPU = {"hardware.accelerator": "cpu", "hardware.per_node": 1, "launch.env.OMP_NUM_THREADS": "'1'"}
"""All sides compute with one thread and update with one, so that the work is compared and not the use of cores."""
LIMIT_S = 900.0
CHECKED = [
    Steps(0, 2, 1, 2, 24, NEVER),
    Steps(2, 2, 1, 2, 24, ALWAYS),
    Steps(4, 2, 1, 2, 24, NEVER),
]
SHAPES = {"64 tokens": Steps(0, 2, 1, 1, 64), "256 tokens": Steps(0, 2, 1, 1, 256)}


def ratios(record: dict[str, Any], side: SideName = "offloaded") -> dict[str, dict[str, float]]:
    """Return the ratios of the others' step times to one side's, by shape."""
    return {
        shape: {other: seconds / times[side] for other, seconds in times.items() if other != side}
        for shape, times in record["step_s"].items()
        if side in times
    }


def main() -> None:
    """Compare bits, measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", default="", help="folder with its packages; without it, it is left out")
    parser.add_argument("--built", default="", help="folder where its compiled optimizer is kept for the next time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", default="40M")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sides: list[SideName] = ["offloaded", "waiting", "device"]
    if asked.deepspeed:
        sides.append("deepspeed")
    with tempfile.TemporaryDirectory() as name:
        built = asked.built or f"{name}/built"
        bench = Bench(Path(name), CPU, asked.deepspeed, built, time.monotonic() + LIMIT_S)
        checked = compare_bits(bench, "tiny", CHECKED, "waiting", "device")
        record = in_turn(bench, "speed", asked.size, sides, SHAPES, asked.rounds)
    result = {"rounds": asked.rounds, "size": asked.size, "checked": checked, "times_as_long": ratios(record), **record}
    write("offload_step", result, "torch")


if __name__ == "__main__":
    main()

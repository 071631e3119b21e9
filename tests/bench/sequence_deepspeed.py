"""Ulysses measured against DeepSpeed's ``DistributedAttention``, with the same module and the same tokens.

``python tests/bench/sequence_deepspeed.py --deepspeed FOLDER`` takes about five minutes on an otherwise idle
machine (Linux, root, iproute2); ``--quick`` checks in one that everything works, and writes nothing. The folder holds
DeepSpeed's packages: ``pip install --target FOLDER --no-deps deepspeed hjson py-cpuinfo msgpack einops``. Four ranks
run one attention module, forward and backward, each in a network namespace behind a link of given rate. Projections are
computed; for scores and values ranks wait for their time, measured first on one core, divided by a factor. Before that,
results and all gradients are compared with one process in float64, if DeepSpeed supports the sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from _pipeline_net import unavailable
from _record import write
from _sequence_job import Case, Job, Shape, run
from sequence import FASTER, RATE_MBIT, rates

RANK = Path(__file__).with_name("_sequence_deepspeed_rank.py")
OURS, PEER = Case("partool", "ulysses"), Case("deepspeed", "ulysses")
LENGTH, WIDTH = 4096, 64
SETTINGS = {
    "8 heads": Shape(1, LENGTH, 8, 8, WIDTH),
    "8 heads, batch of 2": Shape(2, LENGTH // 2, 8, 8, WIDTH),
    "8 heads, 4 of keys": Shape(1, LENGTH, 8, 4, WIDTH),
    "8 heads, 2 of keys": Shape(1, LENGTH, 8, 2, WIDTH),
    "7 heads": Shape(1, LENGTH, 7, 7, WIDTH),
}
ODD = {
    "8 heads": (Shape(2, 32, 8, 8, 6), 4),
    "8 heads, 2 of keys": (Shape(2, 32, 8, 2, 6), 4),
    "7 heads": (Shape(2, 32, 7, 7, 6), 4),
    "14 heads, 7 of keys": (Shape(2, 32, 14, 7, 6), 4),
    "17 tokens on 3 ranks": (Shape(2, 17, 6, 6, 6), 3),
    "3 heads on 4 ranks": (Shape(2, 32, 3, 3, 6), 4),
}
TOLERANCE = 1e-12


def odd() -> list[dict[str, Any]]:
    """Return both sides' difference from one process at small sizes, or the refusal; exits if partool's is large."""
    found = []
    for name, (shape, ranks) in ODD.items():
        ours, peer = (_apart(Job(shape, (case,), ranks=ranks, rounds=0)) for case in (OURS, PEER))
        if isinstance(ours, str) or ours > TOLERANCE:
            sys.exit(f"{name}: {ours}")
        found.append({"sizes": name, "partool": ours, "deepspeed": peer})
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _apart(job: Job) -> float | str:
    """Return the difference of results, or the error message; some sizes crash DeepSpeed's processes."""
    try:
        (found,) = run(job, script=RANK)
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines() if "Error" in line or "what():" in line]
        return said[0] if said else "ended"
    return found.refused or found.apart


def setting(name: str, flops_per_s: tuple[float, float], rounds: int) -> dict[str, Any]:
    """Measure both sides of a setting."""
    job = Job(SETTINGS[name], (OURS, PEER), 4, rounds, 1, RATE_MBIT, flops_per_s)
    ours, peer = run(job, script=RANK)
    ratios = [a / b for a, b in zip(ours.step_s, peer.step_s, strict=True)]
    return {
        "setting": name,
        "partool_s": ours.median_s,
        "deepspeed_s": peer.median_s,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    """Measure and write the results."""
    reader = argparse.ArgumentParser(description="Ulysses measured against DeepSpeed.")
    reader.add_argument("--quick", action="store_true", help="one round of everything; nothing is written")
    reader.add_argument("--deepspeed", type=Path, required=True, help="folder with DeepSpeed's packages")
    options = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended and links removed
    os.environ |= {"DEEPSPEED_PATH": str(options.deepspeed), "DS_ACCELERATOR": "cpu"}
    result: dict[str, Any] = {"odd": odd()}
    if reason := unavailable():
        sys.exit(f"not measured: {reason}")
    forward, backward = rates()
    flops_per_s = (FASTER * forward, FASTER * backward)
    rounds = 1 if options.quick else 15
    result |= {"rate_mbit": RATE_MBIT, "faster_than_core": FASTER, "core_flops_per_s": [forward, backward]}
    result["settings"] = [setting(name, flops_per_s, rounds) for name in SETTINGS]
    if options.quick:
        print(json.dumps(result["settings"], indent=2))
    else:
        write("sequence_deepspeed", result, "torch")


if __name__ == "__main__":
    main()

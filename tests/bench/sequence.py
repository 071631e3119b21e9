"""Sequence parallelism measured: each method against plain ring attention and against Ulysses, and against the plan.

``python tests/bench/sequence.py`` takes about ten minutes on an otherwise idle machine (Linux, root, iproute2);
``--quick`` checks in two that everything works, and writes nothing. Four ranks run one attention layer (for grids two,
one along each axis), forward and backward, each in its own network namespace (or two ranks per namespace) behind a link
of a given rate. Scores and values are not computed: ranks wait for their time, measured first on one core, divided by a
factor; the tensors that are sent are real. All methods run in turn in the same processes. Before that, results and
gradients of all of them are compared with one process, in float64 and at odd sizes.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from typing import Any

import torch
from _pipeline_net import unavailable
from _record import write
from _sequence_job import Case, Found, Job, Shape, run
from _sequence_predict import predicted_s
from _sequence_tables import text, write_tables

RANKS = 4
FASTER = 2
"""Speed of the simulated accelerator relative to the core that attention was measured on."""
RATE_MBIT = 800.0
LATENCY_S = 4e-4
"""Seconds of a small gloo message between two ranks through two links, while four ranks share two cores."""
ULYSSES = Case("Ulysses", "ulysses")
RING = Case("ring, zigzag", "ring", "zigzag")
PLAIN = Case("ring, contiguous", "ring")
USP = Case("USP 2 x 2", "usp", "zigzag", inner=2)
TRAILS = Case("StarTrail C=2", "startrail", "zigzag", teams=2)
GATHER = Case("all-gather of keys", "all_gather")
ALL = (ULYSSES, RING, PLAIN, USP, TRAILS, GATHER)
WINDOWED = (ULYSSES, Case("halo", "ring"), Case("USP 2 x 2, halo", "usp", inner=2), GATHER)
GRID = (ULYSSES, Case("DSP", "dsp", "grid"))
"""Methods for grids; ring attention does not support layers along rows and columns."""
LENGTH, WIDTH = 8192, 64
SETTINGS: dict[str, tuple[Shape, int, tuple[Case, ...]]] = {
    "8 heads": (Shape(1, LENGTH, 8, 8, WIDTH), 1, ALL),
    "8 heads, 2 of keys": (Shape(1, LENGTH, 8, 2, WIDTH), 1, ALL),
    "3 heads": (Shape(1, LENGTH, 3, 3, 128), 1, ALL),
    "8 heads, two nodes of two ranks": (Shape(1, LENGTH, 8, 8, WIDTH), 2, ALL),
    "8 heads, window of 1,024": (Shape(1, LENGTH, 8, 8, WIDTH, 1024), 1, WINDOWED),
    "8 heads, a layer along 64 rows and one along 128 columns": (
        Shape(1, LENGTH, 8, 8, WIDTH, grid=(64, 128)),
        1,
        GRID,
    ),
}
LENGTHS = (2048, 4096)
"""Lengths of the sequences whose memory is compared."""
TOLERANCE = 1e-12


def check() -> float:
    """Return the difference of results and gradients from one process at odd sizes; exits if it is too large."""
    apart = [found.apart for found in run(Job(Shape(2, 29, 6, 2, 8), ALL))]
    apart += [found.apart for found in run(Job(Shape(2, 29, 3, 1, 8, 11), WINDOWED))]
    apart += [found.apart for found in run(Job(Shape(2, 35, 6, 2, 8, grid=(5, 7)), GRID))]
    if max(apart) > TOLERANCE:
        sys.exit(f"results are apart: {apart}")
    return max(apart)


def rates(rounds: int = 5) -> tuple[float, float]:
    """Return the operations per second of attention on one core, forward and backward, medians."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 2, 2048, WIDTH, requires_grad=True) for _ in range(3))
    flops = 4.0 * 2 * WIDTH * 2048 * 2049 / 2
    forward, backward = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = time.perf_counter()
        torch.autograd.backward(out, torch.ones_like(out))
        forward.append(flops / (middle - start))
        backward.append(2.5 * flops / (time.perf_counter() - middle))
    return statistics.median(forward), statistics.median(backward)


def setting(name: str, flops_per_s: tuple[float, float], rounds: int) -> dict[str, Any]:
    """Measure all methods of a setting."""
    shape, per_node, cases = SETTINGS[name]
    job = Job(shape, cases, RANKS, rounds, per_node, RATE_MBIT, flops_per_s, LATENCY_S)
    found = run(job)
    rows = [_row(one, found, job) for one in found]
    return {"setting": name, "rows": rows, "order": _order(rows)}


def _row(one: Found, every: list[Found], job: Job) -> dict[str, Any]:
    by_method = {other.case.method: other for other in reversed(every)}
    return {
        "method": one.case.title,
        "step_s": one.median_s,
        "of_ring": _times(one, by_method.get("ring")),
        "of_ulysses": _times(one, by_method["ulysses"]),
        "predicted_s": predicted_s(one.case, job),
        "waited_s": one.waited_s,
        "sent_bytes": statistics.median(one.sent_bytes),
        "steps_s": one.step_s,
    }


def _times(one: Found, other: Found | None) -> float | None:
    """Return the median ratio of one method's step times to the other's; None if there is no other."""
    if other is None:
        return None
    return statistics.median(a / b for a, b in zip(one.step_s, other.step_s, strict=True))


def _order(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the orders of methods by measured and by predicted time, and the pairs whose order differs.

    Pairs whose measured times are within 5 % of each other count as equal.
    """
    pairs = [(a, b) for at, a in enumerate(rows) for b in rows[:at]]
    far = [(a, b) for a, b in pairs if abs(a["step_s"] / b["step_s"] - 1) > 0.05]
    wrong = [(a, b) for a, b in far if (a["step_s"] < b["step_s"]) != (a["predicted_s"] < b["predicted_s"])]
    return {
        "measured": [row["method"] for row in sorted(rows, key=lambda row: row["step_s"])],
        "predicted": [row["method"] for row in sorted(rows, key=lambda row: row["predicted_s"])],
        "pairs": len(far),
        "otherwise": [[a["method"], b["method"]] for a, b in wrong],
    }


def slopes() -> list[dict[str, Any]]:
    """Return the peak memory growth of each method per token of a sequence and rank, from two lengths.

    The unit is one activation of a rank, its tokens times the width of all heads. The memory of attention on one rank
    alone is the same under every method.
    """
    peaks = [
        [one.peak_bytes for one in run(Job(Shape(1, length, 8, 8, WIDTH), ALL, memory=True))] for length in LENGTHS
    ]
    unit = 8 * WIDTH * 4 / RANKS
    return [
        {
            "method": case.title,
            "peak_bytes": [low, high],
            "activations": (high - low) / (LENGTHS[1] - LENGTHS[0]) / unit,
        }
        for case, low, high in zip(ALL, *peaks, strict=True)
    ]


def main() -> None:
    """Measure, write the results and the tables of the documentation."""
    reader = argparse.ArgumentParser(description="Sequence parallelism measured.")
    reader.add_argument("--quick", action="store_true", help="one round of everything; nothing is written")
    reader.add_argument("--rounds", type=int, default=12, help="steps of each method")
    options = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended and links removed
    apart = check()
    print(f"results and gradients equal one process, apart {apart:.1e}", file=sys.stderr)
    if reason := unavailable():
        sys.exit(f"not measured: {reason}")
    forward, backward = rates()
    flops_per_s = (FASTER * forward, FASTER * backward)
    rounds = 1 if options.quick else options.rounds
    measured = []
    for name in SETTINGS:
        print(name, file=sys.stderr, flush=True)
        measured.append(setting(name, flops_per_s, rounds))
    result = {
        "ranks": RANKS, "rate_mbit": RATE_MBIT, "faster_than_core": FASTER, "core_flops_per_s": [forward, backward],
        "rounds": rounds, "apart": apart, "settings": measured,
    }  # fmt: skip
    result["memory_lengths"], result["memory"] = LENGTHS, slopes()
    if options.quick:
        print(text(result))
    else:
        write("sequence", result, "torch")
        write_tables(result)


if __name__ == "__main__":
    main()

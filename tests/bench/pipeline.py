"""Pipelines measured: the engine against torch.distributed.pipelining, schedules against each other and the simulator.

``python tests/bench/pipeline.py`` measures everything, in about six minutes on an otherwise idle machine;
``--quick`` checks in about two minutes that everything works, and writes nothing. ``--only`` picks parts:

``lists``: four ranks whose stages wait as long as real layers take, measured first; ``overhead``: the same without any
waits; ``real``: two ranks that compute; ``links``: WeiPipe against 1F1B over links of a given rate, which needs root.
In each part all cases run in the same processes in turn. Gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from _pipeline_cases import Case, Found, Job, run
from _pipeline_links import links
from _pipeline_model import Shape, Waits, measure, stage_waits
from _pipeline_tables import write_tables
from _record import RESULTS, write

RANKS = 4
LISTS = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("hanayo", 2),
    ("hanayo", 4),
)
REAL_LISTS = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("hanayo", 2))
ENGINES = ("partool", "torch")
TIMED = Shape(batch=1, length=192, hidden=256, layers=16)
REAL = Shape(batch=1, length=128, hidden=256, layers=8)
TINY = Shape(batch=1, length=5, hidden=32, layers=16, vocab=33)
TOLERANCE = 1e-12


def cases(lists: Sequence[tuple[str, int]], micro_batches: int) -> tuple[Case, ...]:
    """Return every list with both executors, side by side."""
    return tuple(Case(engine, name, micro_batches, chunks) for name, chunks in lists for engine in ENGINES)


def check(lists: Sequence[tuple[str, int]], micro_batches: int, ranks: int) -> float:
    """Return the gradient difference between lists and executors with the same stages; raises if it is too large."""
    job = Job(TINY, cases(lists, micro_batches), real=True, double=True, compare=True)
    _, records = run(job, ranks)
    apart = max(max(record["apart"]) for record in records)
    if not apart <= TOLERANCE or not min(min(record["largest"]) for record in records) > 0:
        raise SystemExit(f"gradients differ by {apart:.1e}, or are missing: nothing is timed")
    return apart


def timed(parts: dict[str, Waits], micro_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all lists with waits in place of arithmetic."""
    found = []
    for case in cases(LISTS, micro_batches):
        waits = stage_waits(parts, TIMED.layers, RANKS * case.chunks)
        found.append(dataclasses.replace(case, waits=tuple(waits)))
    results, _ = run(Job(TIMED, tuple(found), rounds=rounds, steps=2), RANKS)
    return rows(results, RANKS)


def overhead(micro_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all lists without waits: the time of executors and messages alone."""
    nothing = {name: Waits(0.0, 0.0, 0.0) for name in ("layer", "embed", "head")}
    return timed(nothing, micro_batches, rounds)


def real(micro_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Measure lists whose stages compute, on as many ranks as there are cores."""
    results, _ = run(Job(REAL, cases(REAL_LISTS, micro_batches), rounds=rounds, steps=2, real=True), 2)
    return rows(results, 2)


def rows(found: Sequence[Found], ranks: int) -> list[dict[str, Any]]:
    """Return one record per list, from its runs with this engine and with the peer's."""
    return [_row(ours, peer, ranks) for ours, peer in zip(found[::2], found[1::2], strict=True)]


def _row(ours: Found, peer: Found, ranks: int) -> dict[str, Any]:
    simulated_s = ours.simulated_s(ranks, measured=True)
    row = {
        "schedule": ours.case.title,
        "micro_batches": ours.case.micro_batches,
        "partool_s": ours.median_s,
        "torch_s": peer.median_s,
        "ratio_median": statistics.median(a / b for a, b in zip(ours.step_s, peer.step_s, strict=True)),
        "ratio_of_medians": ours.median_s / peer.median_s,
        "simulated_s": simulated_s,
        "executed_over_simulated": ours.median_s / simulated_s,
        "one_way_s": ours.one_way_s,
        "steps_partool_s": ours.step_s,
        "steps_torch_s": peer.step_s,
    }
    if ours.case.waits:
        row["simulated_from_waits_s"] = ours.simulated_s(ranks)
    return row


def main() -> None:
    """Measure, write the results and the tables of the documentation."""
    reader = argparse.ArgumentParser(description="Pipelines measured.")
    reader.add_argument("--quick", action="store_true", help="one round of everything; nothing is written")
    reader.add_argument("--only", default="lists,overhead,real,links", help="parts, separated by commas")
    options = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended and namespaces removed
    parts, rounds = options.only.split(","), 1 if options.quick else 5
    result: dict[str, Any] = _earlier() if not options.quick else {}
    started_s = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started_s:.0f} s: {what}", file=sys.stderr, flush=True)

    if "lists" in parts:
        say("gradients of all lists")
        result["gradients_apart_4_ranks"] = check(LISTS, RANKS, RANKS)
        waits = measure(TIMED)
        result["waits_s"] = {name: dataclasses.asdict(part) for name, part in waits.items()}
        result["model"] = dataclasses.asdict(TIMED)
        say("all lists, waits for arithmetic")
        result["lists"] = timed(waits, 2 * RANKS, rounds)
        result["lists_fewest_micro_batches"] = timed(waits, RANKS, rounds)
    if "overhead" in parts:
        say("all lists, no waits")
        result["overhead"] = overhead(2 * RANKS, 2 * rounds)
    if "real" in parts:
        say("real layers")
        result["gradients_apart_2_ranks"] = check(REAL_LISTS, 4, 2)
        result["real_model"] = dataclasses.asdict(REAL)
        result["real"] = real(8, rounds)
    if "links" in parts:
        say("slow links")
        result |= links(quick=options.quick)
    say("done")
    if options.quick:
        print(json.dumps(result, indent=2))
    else:
        write("pipeline", result, "torch")
        write_tables(result)


def _earlier() -> dict[str, Any]:
    """Return the parts measured earlier, which a run of other parts keeps."""
    path = RESULTS / "pipeline.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in ("benchmark", "date", "machine", "versions")}


if __name__ == "__main__":
    main()

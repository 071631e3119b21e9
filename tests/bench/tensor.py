"""Tensor parallelism measured: the trainer's step on two ranks against a hand-written step, and against others.

``python tests/bench/tensor.py`` measures everything, in about ten minutes on an otherwise idle machine;
``--quick`` checks in about two minutes that everything works, and writes nothing. ``--only`` picks parts:

``hand``: against torch's DTensor; ``overlap``: overlapped and chunked against plain; ``one``: the cost that exchanges
of tensor ranks would have on a single rank; ``deepspeed``: a Hugging Face model against DeepSpeed's AutoTP, whose
packages are in the folder ``--deepspeed`` (``pip install --target FOLDER --no-deps deepspeed hjson py-cpuinfo msgpack
einops``). In each part all cases run in the same processes in turn. Losses of several steps are compared before
anything is timed, in float64 except for DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from _record import RESULTS, write
from _tensor_hf import against_deepspeed
from _tensor_job import Case, Found, Job, make_plan, ratio, run, together
from _tensor_specs import SHAPES, SIZES, TINY, TOLERANCE, apart, spec
from _tensor_tables import write_tables

NORMS = {"sequence_norms": True}
HAND = (
    Case("whole sequence", "partool"),
    Case("whole sequence", "dtensor"),
    Case("sequence-parallel norms", "partool", NORMS),
    Case("sequence-parallel norms", "dtensor", NORMS),
)
OVERLAP = (
    Case("plain"),
    Case("overlap: backward", layout={"tensor_overlap": "backward"}),
    Case("2 chunks", layout={"tensor_chunks": 2}),
    Case("overlap: backward, 2 chunks", layout={"tensor_overlap": "backward", "tensor_chunks": 2}),
    Case("sequence-parallel norms", layout=NORMS),
    Case("sequence-parallel norms, overlap: backward", layout=NORMS | {"tensor_overlap": "backward"}),
)
PARTS = "hand,overlap,one,deepspeed"
ONE = (Case("no exchanges", layout={"mesh": {}}), Case("exchanges of one rank", "hooked", {"mesh": {}}))
GOAL_RATIO = 1.02
ONE_GOAL_RATIO = 1.01


def check(cases: Sequence[Case], *, accelerator: str = "cpu", ranks: int = 2) -> float:
    """Return the relative difference of the losses of a few steps in float64; exits if it is too large."""
    plan = make_plan(spec(TINY, (2, 12), "fp64", accelerator=accelerator))
    return apart(run(Job(tuple(cases), plan, ranks=ranks, losses=4)), TOLERANCE)


def timed(
    cases: Sequence[Case], size: str, rounds: int, *, accelerator: str = "cpu", precision: str = "fp32", ranks: int = 2
) -> list[Found]:
    """Time the cases on a model of the given size."""
    plan = make_plan(spec(SIZES[size], SHAPES[size], precision, accelerator=accelerator))
    return run(Job(tuple(cases), plan, ranks=ranks, rounds=rounds, steps=2))


def one(size: str, rounds: int, *, accelerator: str = "cpu", precision: str = "fp32") -> dict[str, Any]:
    """Measure the cost of exchanges in a group of one rank; the trainer inserts none."""
    plain, hooked = timed(ONE, size, rounds, accelerator=accelerator, precision=precision, ranks=1)
    return {"size": size, "plain_s": plain.median_s, "hooked_s": hooked.median_s, "ratio_median": ratio(hooked, plain)}


def hand(size: str, rounds: int) -> list[dict[str, Any]]:
    """Measure against DTensor; one record for each pair of cases."""
    found = timed(HAND, size, rounds)
    return [_pair(size, ours, peer) for ours, peer in zip(found[::2], found[1::2], strict=True)]


def _pair(size: str, ours: Found, peer: Found) -> dict[str, Any]:
    return {
        "size": size,
        "case": ours.case.title,
        "partool_s": ours.median_s,
        "peer_s": peer.median_s,
        "ratio_median": ratio(ours, peer),
        "ratio_of_medians": ours.median_s / peer.median_s,
        "steps_partool_s": ours.step_s,
        "steps_peer_s": peer.step_s,
    }


def main() -> None:
    """Measure, write the results and the tables of the documentation."""
    reader = argparse.ArgumentParser(description="Tensor parallelism measured.")
    reader.add_argument("--quick", action="store_true", help="one round of everything; nothing is written")
    reader.add_argument("--only", default=PARTS, help="parts, separated by commas")
    reader.add_argument("--deepspeed", default="", help="folder with DeepSpeed's packages")
    options = reader.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended
    parts, rounds = options.only.split(","), 1 if options.quick else 12
    result: dict[str, Any] = _earlier() if not options.quick else {}
    started_s = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started_s:.0f} s: {what}", file=sys.stderr, flush=True)

    result["goal_ratio"] = GOAL_RATIO
    result["models"] = {size: _model(size) for size in SIZES}
    if "hand" in parts:
        say("losses against DTensor")
        result["losses_apart_hand"] = check(HAND)
        say("times against DTensor")
        result["hand"] = [row for size in SIZES for row in hand(size, rounds)]
    if "overlap" in parts:
        say("losses of overlapped steps")
        result["losses_apart_overlap"] = check(OVERLAP)
        say("times of overlapped steps")
        result["overlap"] = [{"size": size} | row for size in SIZES for row in together(timed(OVERLAP, size, rounds))]
    if "one" in parts:
        say("losses of one rank")
        result["losses_apart_one"] = check(ONE, ranks=1)
        say("times of one rank")
        result["one"] = [one(size, rounds) for size in SIZES]
    if "deepspeed" in parts and options.deepspeed:
        say("against DeepSpeed")
        result |= against_deepspeed(options.deepspeed, rounds)
    say("done")
    if options.quick:
        print(json.dumps(result, indent=2))
    else:
        write("tensor", result, "torch")
        write_tables(result)


def _model(size: str) -> dict[str, Any]:
    return SIZES[size] | {"batch": SHAPES[size][0], "length": SHAPES[size][1]}


def _earlier() -> dict[str, Any]:
    """Return the parts measured earlier, which a run of other parts keeps."""
    path = RESULTS / "tensor.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key not in ("benchmark", "date", "machine", "versions")}


if __name__ == "__main__":
    main()

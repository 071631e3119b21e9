"""First contact with a machine's GPUs, in at most four minutes: one JSON to send back, and no knowledge needed.

The machine's GPUs (1, 2, 4 or 8 of them) run the first steps of every schedule and of other ways to train, once as
usual and once with ``CUDA_LAUNCH_BLOCKING=1``, where every kernel is a wait for the device. The result has the cases
that hang with the stacks of their ranks, losses that differ between cases, the process groups beside those that the
planner counts, the memory that they take, the devices on which each process has a context, the allocator's statistics
and how often the host waits for its device in a step. ``--dry`` tries everything with two ranks on a CPU; its figures
mean nothing and are not kept.

Without a GPU the script says so and exits with code 2; if something is wrong, with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _record import write
from _start import start_ranks

from partool.cost.codec import encode
from partool.cost.training.communicators import communicators
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.spec import load_text
from partool.strategies.schedules import SCHEDULES
from partool.work.training import TrainingWork

RANK = Path(__file__).parent / "_first_contact_rank.py"
BESIDE = ("contexts", "process")
"""Results of ranks that are of no case."""
WHOLE_S = 240.0
HANG_S = 40.0
"""Seconds after which a case counts as hanging; twice as many for the first case, which starts all libraries."""
ROUNDS = {"as usual": {}, "launches block": {"CUDA_LAUNCH_BLOCKING": "1"}}
MOST_WAITS = 2
"""Waits of a step: for its gradients' norm and its loss, and for the count of its tokens, which is known by then. With
the optimizer on the host there is one more, for the norm of its part."""
MOST_APART = 0.02
"""Largest relative difference between the losses of two plans in bf16, which sum in different orders."""
SIZES = {
    "cuda": "{hidden: 1024, layers: 16, heads: 16, vocab: 256, ffn_hidden: 2816}",
    "cpu": "{hidden: 32, layers: 8, heads: 4, vocab: 256, ffn_hidden: 32}",
}
SPEC = """\
name: first-contact
model: {model}
hardware: {{accelerator: {accelerator}, per_node: {ranks}}}
data: python-stdlib
training: {{sequence_length: {length}, global_batch: 16, steps: 9, precision: {precision}}}
parallel: {{micro_batch: {micro_batch}, compile: none, {parallel}}}
kernels: {{mode: torch}}
"""


def cases(ranks: int) -> dict[str, str]:
    """Return the ``parallel`` section of each case, by name."""
    alone = "tensor: 1, sequence: 1, pipeline: 1"
    found = {
        "zero 3": f"{alone}, data: {{zero: 3}}",
        "optimizer on the host": f"{alone}, data: {{zero: 2}}, offload: {{optimizer: cpu}}",
        "activations on the host": f"{alone}, data: {{zero: 3}}, offload: {{activations: cpu}}",
    }
    if ranks == 1:
        return found
    tensor = 2 if ranks >= 4 else 1
    found |= {"tensor": f"tensor: {ranks}, sequence: 1, pipeline: 1"}
    found |= {
        method: f"tensor: 1, pipeline: 1, sequence: {{degree: {ranks}, method: {method}}}"
        for method in ("ring", "ulysses")
    }
    for name, record in SCHEDULES.items():
        inside = tensor if record.moves == "activations" else 1
        stages = ranks // inside if record.moves == "activations" else ranks
        found[name] = f"tensor: {inside}, sequence: 1, pipeline: {{stages: {stages}, schedule: {name}}}"
    return found


def plan_of(parallel: str, ranks: int, kind: str, accelerator: str = "auto") -> tuple[Plan | None, str]:
    """Return the plan of a case, and why there is none; ``auto`` is the accelerator of this machine."""
    text = SPEC.format(
        model=SIZES[kind],
        accelerator=accelerator if kind == "cuda" else "cpu",
        ranks=ranks,
        micro_batch=4 if ranks == 1 else 1,  # only pipelines need many micro-batches
        length=1024 if kind == "cuda" else 64,
        precision="bf16" if kind == "cuda" else "fp32",
        parallel=parallel,
    )
    spec = load_text(text).spec
    assert spec is not None, text
    result = make_plan(spec, base_dir=Path.cwd(), default_name="first-contact")
    errors = "; ".join(one.message for one in result.diagnostics if one.severity == "error")
    return result.plan, errors


def counted(plan: Plan) -> dict[str, int]:
    """Return how many groups the planner counts, by kind."""
    training = plan.training
    job = TrainingWork(
        plan.model, plan.devices, training.sequence_length, training.precision, global_batch=training.global_batch
    )
    found = communicators(job, encode(plan.layout))
    return {kind: number for kind, number in zip(("collective", "wires"), map(int, found[:2]), strict=True) if number}


def run_all(
    plans: Mapping[str, Path],
    folder: Path,
    ranks: int,
    environment: Mapping[str, str],
    until_s: float,
    **asked: object,
) -> dict[str, Any]:
    """Run the plans; one that hangs or fails is recorded with the stacks of all ranks, and the next ones go on.

    ``asked`` goes to the ranks with the job.
    """
    found: dict[str, Any] = {}
    left = dict(plans)
    while left:
        rest_s = until_s - time.monotonic()
        if rest_s < HANG_S:
            return found | {name: {"not_run": "the time is up"} for name in left}
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.json"), *folder.glob("*.stack")):
            old.unlink()
        job = {"plans": {name: str(path) for name, path in left.items()}, "hang_s": min(HANG_S, rest_s / 3)}
        job |= asked
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        failure = ""
        try:
            start_ranks(RANK, folder, ranks, rest_s, environment=environment)
        except RuntimeError as error:
            failure = str(error)
        done = gathered(folder, ranks)
        found |= done
        left = {name: path for name, path in left.items() if name not in done}
        shown = stacks(folder, ranks)
        if not left or (time.monotonic() >= until_s and not any(shown)):
            continue  # a case that was ended by the time for everything did not fail
        name = next(iter(left))
        found[name] = {"failed": failure.splitlines()[-40:], "stacks": shown}
        del left[name]
    return found


def gathered(folder: Path, ranks: int) -> dict[str, Any]:
    """Return the results of the cases that all ranks have finished, a list over ranks for each figure."""
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    of_ranks = [json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files]
    names = [name for name in of_ranks[0] if name not in BESIDE and all(name in found for found in of_ranks)]
    result: dict[str, Any] = {
        name: {figure: [found[name][figure] for found in of_ranks] for figure in of_ranks[0][name]} for name in names
    }
    if "contexts" in of_ranks[0]:
        result["contexts"] = own_contexts(of_ranks[0]["contexts"], [found.get("process") for found in of_ranks])
    return result


def own_contexts(lines: list[str] | None, processes: list[int | None]) -> dict[str, list[str]] | None:
    """Return the devices on which each rank's process has a context; None where nobody tells or no rank is listed."""
    ours: dict[str, list[str]] = {}
    for line in lines or ():
        process, _, rest = (part.strip() for part in line.partition(","))
        if process.isdecimal() and int(process) in processes:
            ours.setdefault(process, []).append(rest)
    return ours or None


def stacks(folder: Path, ranks: int) -> list[list[str]]:
    """Return the stack of each rank's main thread, the innermost call first; empty for a rank that showed none."""
    texts = [folder / f"{rank}.stack" for rank in range(ranks)]
    shown = [text.read_text(encoding="utf-8") if text.exists() else "" for text in texts]
    return [text.rpartition("(most recent call first):")[2].strip().splitlines()[:25] for text in shown]


def wrong(rounds: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Plan]) -> list[str]:
    """Return a sentence for each result that shows a fault, and for each case without a result."""
    found = []
    for how, results in rounds.items():
        want = next((result["losses"][0] for result in results.values() if result and "losses" in result), None)
        for name, result in results.items():
            if name == "contexts":
                several = {process: own for process, own in (result or {}).items() if len(own) > 1}
                found += [f"{how}: process {each} has contexts on {len(own)} devices" for each, own in several.items()]
                continue
            found += [f"{how}, {name}: {fault}" for fault in faults(result, want, plans[name])]
    return found


def faults(result: Mapping[str, Any], want: list[float] | None, plan: Plan) -> list[str]:
    """Return what is wrong with a case; ``want`` are the losses of another case."""
    if "losses" not in result:
        return ["hangs or fails" if "failed" in result else f"was not run: {result['not_run']}"]
    found = []
    losses = result["losses"][0]
    if want is not None and not all(math.isclose(a, b, rel_tol=MOST_APART) for a, b in zip(losses, want, strict=True)):
        found.append(f"losses {losses} instead of {want}")
    opened = {kind: max(one.get(kind, 0) for one in result["groups"]) for kind in ("collective", "wires")}
    if {kind: number for kind, number in opened.items() if number} != (planned := counted(plan)):
        found.append(f"groups {opened}, the planner counts {planned}")
    most = MOST_WAITS + (plan.layout.offload.optimizer != "none")
    if any(waits is not None and waits > most for waits in result["host_waits"]):
        found.append(f"the host waits for the device {max(result['host_waits'])} times in a step")
    return found


def machine(kind: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    if kind == "cpu":
        return {}
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "capability": torch.cuda.get_device_capability(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "runtime": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "PYTORCH_"))},
    }


def contact(kind: str, ranks: int, whole_s: float, folder: Path) -> dict[str, Any]:
    """Run all cases in both rounds and return the record."""
    started_s = time.monotonic()
    plans, refused = {}, {}
    for name, parallel in cases(ranks).items():
        plan, errors = plan_of(parallel, ranks, kind)
        if plan is None:
            refused[name] = errors
            continue
        plans[name] = plan
        (folder / f"{name}.plan.json").write_text(plan.to_json(), encoding="utf-8")
    paths = {name: folder / f"{name}.plan.json" for name in plans}
    allocator = {} if kind == "cpu" else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    rounds: dict[str, Any] = {}
    for number, (how, own) in enumerate(ROUNDS.items(), 1):
        until_s = started_s + whole_s * number / len(ROUNDS)
        rounds[how] = run_all(paths, folder / how, ranks, allocator | own, until_s)
    return {
        "machine_of_ranks": machine(kind),
        "ranks": ranks,
        "not_planned": refused,
        "wrong": [f"{name} has no plan: {errors}" for name, errors in refused.items()] + wrong(rounds, plans),
        "rounds": rounds,
    }


def main() -> None:
    """Run the first contact and print its JSON."""
    parser = argparse.ArgumentParser(description="First contact with a machine's GPUs.")
    parser.add_argument("--dry", action="store_true", help="two ranks on a CPU; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="time for everything")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("tests/bench/first_contact.py needs a GPU that torch can use; there is none here", file=sys.stderr)
        sys.exit(2)
    kind, ranks = ("cpu", 2) if asked.dry else ("cuda", 1 << (min(8, torch.cuda.device_count()).bit_length() - 1))
    with tempfile.TemporaryDirectory() as name:
        result = contact(kind, ranks, asked.seconds, Path(name))
    if asked.dry:
        print(json.dumps(result))
    else:
        write("first_contact", result, "torch")
    for sentence in result["wrong"]:
        print(sentence, file=sys.stderr)
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()

"""One GPU, in under nine minutes: correctness, speed and predictions of optimizers in host memory.

First, a bitwise comparison: partool's offloaded steps against a hand-written loop, some of them clipped, and losses
against those with the optimizer on the device. Then a full fine-tune of 3 billion parameters, clipping on, from 1,024
to 32,768 tokens a step: partool and DeepSpeed's ZeRO-Offload with the optimizer in host memory, and partool with all of
it on the device, running at the same time and making steps in turn. Then 6.5 billion, the most that ZeRO-Offload holds
with 128 GiB of host memory, one side after the other. Weights are constants, which do not change the speed. Last, the
largest model that the planner considers trainable on this machine.

DeepSpeed comes from a folder (``--deepspeed``; its optimizer is compiled there, a minute); without one it is left out.
``--parts`` and ``--size`` choose less, for a machine that is lent for minutes: the last part then has all time that
``--seconds`` leaves. ``--dry`` makes every step on this machine's CPU at tiny sizes; its figures mean nothing and are
not kept. Without a GPU the script says so and exits with code 2; if a result is wrong, with 1.

    python tests/bench/offload_gpu.py --deepspeed /data/ds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _offload_job import ALWAYS, NEVER, SIZES, SideName, Steps, make_plan, read_plan
from _offload_talk import Bench, compare_bits, in_turn
from _record import write

WHOLE_S = 525.0
PARTS_END_S = {"checks": 90.0, "together": 240.0, "apart": 480.0, "largest": WHOLE_S}
"""Seconds since the start by which each part ends, except the last one of those that are asked for; time left over goes
to the next."""
DRY_S = 3600.0
LEAST_S = 30.0
"""Smallest remaining time for which a side is started."""
GOALS = {"deepspeed": 1.0}
"""Smallest ratio of the others' step time to partool's, at every number of tokens."""
GOAL_BALANCED, BALANCED = 1.5, (0.67, 1.5)
"""Goal where the host's pass alone takes about as long as the backward pass, and the ratios that count as such."""
NOT_ALLOCATED = ("framework", "fragmentation")
"""Terms of predicted memory that torch's allocator does not count as allocated."""
CHECKED = [Steps(0, 3, 1, 2, 96), Steps(3, 2, 1, 2, 96, ALWAYS), Steps(5, 3, 1, 2, 96)]
ACCUMULATED = [Steps(0, 2, 3, 1, 96), Steps(2, 2, 3, 1, 96, ALWAYS), Steps(4, 2, 3, 1, 96)]
SHAPES = {
    "1024 tokens": Steps(0, 3, 1, 1, 1024),
    "4096 tokens": Steps(0, 3, 1, 1, 4096),
    "32768 tokens": Steps(0, 2, 1, 8, 4096),
    "4096 tokens, each step clipped": Steps(0, 3, 1, 1, 4096, ALWAYS),
}
DRY_SHAPES = {"32 tokens": Steps(0, 2, 1, 1, 32), "64 tokens, each step clipped": Steps(0, 2, 1, 2, 32, ALWAYS)}


def ratios(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the ratios of the others' step times to partool's offloaded step, by shape."""
    return {
        shape: {other: seconds / times["offloaded"] for other, seconds in times.items() if other != "offloaded"}
        for shape, times in record["step_s"].items()
        if "offloaded" in times
    }


def losses_apart(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest relative difference of the others' losses from those of partool with offload."""
    found: dict[str, float] = {}
    for sides in record["losses"].values():
        for other, losses in sides.items():
            pairs = zip(losses, sides.get("offloaded", losses), strict=True)
            found[other] = max(found.get(other, 0.0), *(abs(a - b) / abs(b) for a, b in pairs))
    return found


def speeds(record: Mapping[str, Any], shapes: Mapping[str, Steps]) -> dict[str, dict[str, float]]:
    """Return tokens per second, by shape and side."""
    return {
        shape: {
            side: shapes[shape].sequences * shapes[shape].micro_batches * shapes[shape].tokens / seconds
            for side, seconds in times.items()
        }
        for shape, times in record["step_s"].items()
    }


def overlap(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the time of the host's passes of a step, by shape, and the share of it that training hid."""
    return {
        shape: {
            "passes_s": sides["offloaded"]["passes_s"] / sides["offloaded"]["steps"],
            "waited_s": sides["offloaded"]["waited_s"] / sides["offloaded"]["steps"],
            "hidden": max(0.0, 1.0 - sides["offloaded"]["waited_s"] / sides["offloaded"]["passes_s"]),
        }
        for shape, sides in record["figures"].items()
        if sides.get("offloaded", {}).get("passes_s")
    }


def memory(record: Mapping[str, Any], side: SideName) -> dict[str, Any]:
    """Return predicted and measured peaks of a side: of torch's allocator, of host memory by the side's own count, and
    of the whole process's growth, which includes more than is predicted: libraries, the device's driver.
    """
    usage, predicted = record["usage"].get(side), record.get("predicted", {}).get(side)
    if usage is None or predicted is None:
        return {}
    device = sum(size for term, size in predicted["memory_bytes"].items() if term not in NOT_ALLOCATED)
    host = sum(predicted["host_bytes"].values())
    found = {"device": (device, usage["device_bytes"])}
    if host:
        found |= {"host": (host, sum(usage["held_bytes"].values())), "process": (host, usage["host_bytes"])}
    return {
        where: {"predicted_bytes": expected, "measured_bytes": seen, "ratio": expected / seen if seen else None}
        for where, (expected, seen) in found.items()
    }


def together(bench: Bench, size: str, shapes: Mapping[str, Steps], rounds: int) -> dict[str, Any]:
    """Measure all sides in turn."""
    sides: list[SideName] = ["offloaded", "device"]
    if bench.deepspeed:
        sides.insert(1, "deepspeed")
    return summary(in_turn(bench, size, size, sides, shapes, rounds), shapes)


def apart(bench: Bench, size: str, shapes: Mapping[str, Steps], rounds: int) -> dict[str, Any]:
    """Measure one side after the other, as host memory holds only one; merge their results."""
    sides: list[SideName] = ["offloaded", "deepspeed", "device"] if bench.deepspeed else ["offloaded", "device"]
    merged: dict[str, Any] = {}
    for place, side in enumerate(sides):
        left_s = bench.until_s - time.monotonic()
        if left_s < LEAST_S:
            merged.setdefault("failed", {})[side] = "no time left"
            continue
        until_s = time.monotonic() + left_s / (len(sides) - place)
        merge(merged, in_turn(replace(bench, until_s=until_s), size, size, [side], shapes, rounds))
    return summary(merged, shapes)


def merge(into: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Merge one side's results into those of the others."""
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def summary(record: dict[str, Any], shapes: Mapping[str, Steps]) -> dict[str, Any]:
    """Add the figures that matter to what was measured."""
    found, balance = ratios(record), balanced(record)
    goals = {
        shape: {"goal": (goal := GOAL_BALANCED if shape in balance else GOALS["deepspeed"]), "met": slower >= goal}
        for shape, others in found.items()
        if (slower := others.get("deepspeed")) is not None
    }
    return {
        "times_as_long_as_partool": found,
        "losses_apart": losses_apart(record),
        "tokens_per_s": speeds(record, shapes),
        "goals": goals,
        "overlap": overlap(record),
        "memory": {side: memory(record, side) for side in ("offloaded", "device")},
        **record,
    }


def balanced(record: Mapping[str, Any]) -> set[str]:
    """Return the shapes where the host's passes alone take about as long as the backward pass.

    The backward pass, with recomputed layers, is three quarters of the step of the side with the optimizer on the
    device.
    """
    ratio = {
        shape: found["passes_s"] / (0.75 * record["step_s"][shape]["device"])
        for shape, found in overlap(record).items()
        if "device" in record["step_s"][shape]
    }
    return {shape for shape, value in ratio.items() if BALANCED[0] <= value <= BALANCED[1]}


def largest(bench: Bench, size: str) -> dict[str, Any]:
    """Return the most layers of a model's shape that the planner says fit, with and without offload."""
    found: dict[str, Any] = {}
    settings = {"training.sequence_length": 4096, "training.global_batch": 1} | dict(bench.device)
    for where in ("none", "cpu"):
        asked = settings | {"parallel.offload.optimizer": where}
        try:
            plan = read_plan(make_plan(bench.folder / "largest" / where, size, asked, "--largest", "model"))
        except RuntimeError as error:
            found[where] = {"failed": str(error)}
            continue
        layers, memory = plan.model.layers, plan.prediction.memory
        found[where] = {"layers": layers, "parameters": parameters(size, layers), "host_bytes": memory.host_bytes}
    return found


def parameters(size: str, layers: int) -> int:
    """Return the number of parameters of one of the sizes with the given number of layers."""
    shape = SIZES[size]
    hidden, width = shape["hidden"], shape["hidden"] // shape["heads"] * shape["kv_heads"]
    layer = 2 * hidden * (hidden + width) + 3 * hidden * shape["ffn_hidden"] + 2 * hidden
    return int(layers * layer + 2 * shape["vocab"] * hidden + hidden)


def main() -> None:
    """Check, measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", default="", help="folder with its packages; without it, it is left out")
    parser.add_argument("--built", default="", help="folder where its compiled optimizer is kept for the next time")
    parser.add_argument("--parts", nargs="+", choices=PARTS_END_S, default=list(PARTS_END_S), help="only these parts")
    parser.add_argument("--size", choices=SIZES, default="3B", help="model of the sides that run together")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="time for everything")
    parser.add_argument("--dry", action="store_true", help="on this machine's CPU, at tiny sizes")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("tests/bench/offload_gpu.py needs a GPU that torch can use; there is none here", file=sys.stderr)
        sys.exit(2)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        device: dict[str, object] = {"hardware.accelerator": "auto", "hardware.per_node": 1}
        if asked.dry:  # beside other work a second thread slows the pass down
            device |= {"hardware.accelerator": "cpu", "launch.env.OMP_NUM_THREADS": "'1'"}
            os.environ["OMP_NUM_THREADS"] = "1"
        built = asked.built or f"{name}/built"
        whole = Bench(Path(name), device, asked.deepspeed, built, start_s + (DRY_S if asked.dry else asked.seconds))
        result = measure(whole, start_s, asked.parts, "tiny" if asked.dry else asked.size, dry=asked.dry)
    result["seconds"] = round(time.monotonic() - start_s, 1)
    if asked.dry:
        print(json.dumps(result, indent=2))
    else:
        write("offload_gpu", {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **result}, "torch")


def measure(whole: Bench, start_s: float, parts: Sequence[str], size: str, *, dry: bool) -> dict[str, Any]:
    """Return the results of the parts."""
    shapes, small, large = (DRY_SHAPES, "tiny", "tiny") if dry else (SHAPES, "40M", "6.5B")
    result: dict[str, Any] = {"clipped_norms": {"never": NEVER, "always": ALWAYS}}
    for name in (each for each in PARTS_END_S if each in parts):
        ends_s = whole.until_s if dry or name == parts[-1] else min(start_s + PARTS_END_S[name], whole.until_s)
        part = replace(whole, until_s=ends_s)
        if name == "checks":
            result[name] = {"one micro-batch": compare_bits(part, small, CHECKED, "waiting", "device")}
            result[name]["three micro-batches"] = compare_bits(part, small, ACCUMULATED)
            print(json.dumps(result[name]), flush=True)
        elif name == "together":
            result[size] = together(part, size, shapes, 1 if dry else 3)
            print(json.dumps(result[size]["times_as_long_as_partool"]), flush=True)
        elif name == "apart":
            result["one after the other" if dry else large] = apart(part, large, shapes, 1 if dry else 2)
        else:
            result[name] = largest(part, large)
    return result


if __name__ == "__main__":
    main()

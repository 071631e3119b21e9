"""Memory, losses and step times of one GPU, beside the plan's and the dry run's, in about five minutes.

Small models train for a few steps in one process, one way after the other: each kind of kernel, recomputation, ZeRO,
offload, eight bits, experts and latent attention. Beside a case's figures stand those of its plan and of its dry run,
which runs on the machine's other cores. The losses of all cases of a model are compared.

``--dry`` tries everything on a CPU with two layers; its figures mean nothing and are not kept. Without a GPU the script
says so and exits with code 2; if a result is wrong, with 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _record import write
from first_contact import machine, run_all

from partool.plan.types import Plan
from partool.planner import make_plan
from partool.spec import load_text

STEPS = 6
WHOLE_S = 330.0
DRY_RUNS_AT_ONCE = 6
DRY_RUN_S = 150.0
MOST_APART = {"fp8": 0.1}
"""Largest difference of a loss from that of the model's first case, as a share of its first loss, by words in a case's
name."""
USUALLY_APART = 0.02
NOT_ALLOCATED = ("framework", "fragmentation")
"""Terms of predicted memory that torch's allocator does not count as allocated."""
DENSE = "hidden: {hidden}, layers: {layers}, heads: 16, vocab: 32000, ffn_hidden: {wide}"
MODELS = {
    "dense": "kv_heads: 8",
    "layer norm": "kv_heads: 8, norm: layernorm, activation: gelu, position: learned, ffn_bias: true, qkv_bias: true, "
    "out_bias: true",
    "experts": "kv_heads: 8, moe: {experts: 16, top_k: 2, ffn_hidden: NARROW, aux_loss: 0.01}",
    "latent": "mla: {q_rank: 384, kv_rank: 128, nope_head_dim: 64, rope_head_dim: 32, v_head_dim: 64}, "
    "moe: {experts: 16, top_k: 4, ffn_hidden: NARROW, shared_experts: 1, first_dense_layers: 1, scores: sigmoid, "
    "bias_rate: 0.001}",
}
"""Fields of the models beside those of ``DENSE``; cases of one model have the same weights."""
WIDTHS = {
    "cuda": {"hidden": 2048, "layers": 8, "wide": 5632, "narrow": 1408},
    "cpu": {"hidden": 64, "layers": 2, "wide": 96, "narrow": 32},
}
TORCH, OURS = "kernels: {mode: torch}", "kernels: {mode: native}"
CASES: dict[str, tuple[str, str, str, str]] = {
    "dense, torch's operators": ("dense", "data: {zero: 0}, recompute: none, compile: none", TORCH, "bf16"),
    "dense, kernels": ("dense", "data: {zero: 0}, recompute: none, compile: none", OURS, "bf16"),
    "dense, compiled": ("dense", "data: {zero: 0}, recompute: none, compile: block", OURS, "bf16"),
    "dense, ZeRO-3, compiled": ("dense", "data: {zero: 3}, recompute: none, compile: block", OURS, "bf16"),
    "dense, ZeRO-3, full": ("dense", "data: {zero: 3}, recompute: full, compile: block", OURS, "bf16"),
    "dense, selective": ("dense", "data: {zero: 2}, recompute: selective, compile: none", OURS, "bf16"),
    "dense, optimizer on the host": (
        "dense",
        "data: {zero: 2}, recompute: none, offload: {optimizer: cpu}",
        OURS,
        "bf16",
    ),
    "dense, activations on the host": ("dense", "data: {zero: 3}, offload: {activations: cpu}", OURS, "bf16"),
    "dense, fp8": ("dense", "data: {zero: 0}, recompute: none, compile: none", OURS, "fp8"),
    "layer norm, torch's operators": ("layer norm", "data: {zero: 0}, recompute: none, compile: none", TORCH, "bf16"),
    "layer norm, compiled": ("layer norm", "data: {zero: 1}, recompute: none, compile: block", OURS, "bf16"),
    "experts, torch's operators": ("experts", "data: {zero: 0}, recompute: none, compile: none", TORCH, "bf16"),
    "experts, kernels": ("experts", "data: {zero: 0}, recompute: none, compile: none", OURS, "bf16"),
    "experts, ZeRO-3, full": ("experts", "data: {zero: 3}, recompute: full, compile: none", OURS, "bf16"),
    "experts, selective": ("experts", "data: {zero: 2}, recompute: selective, compile: block", OURS, "bf16"),
    "latent, torch's operators": ("latent", "data: {zero: 0}, recompute: none, compile: none", TORCH, "bf16"),
    "latent, kernels": ("latent", "data: {zero: 0}, recompute: none, compile: none", OURS, "bf16"),
    "latent, compiled": ("latent", "data: {zero: 2}, recompute: none, compile: block", OURS, "bf16"),
    "latent, ZeRO-3, full": ("latent", "data: {zero: 3}, recompute: full, compile: none", OURS, "bf16"),
}
"""By name: the model, parts of ``parallel``, the section ``kernels``, and the precision."""
SPEC = """\
name: one-gpu
model: {{{model}}}
hardware: {{accelerator: {accelerator}, per_node: 1}}
data: python-stdlib
training: {{sequence_length: {length}, global_batch: 8, steps: 9, precision: {precision}}}
parallel: {{micro_batch: 4, tensor: 1, sequence: 1, pipeline: 1, {parallel}}}
{kernels}
"""


def plan_of(name: str, kind: str, accelerator: str) -> tuple[Plan | None, str]:
    """Return the plan of a case, and why there is none."""
    model, parallel, kernels, precision = CASES[name]
    cpu = kind == "cpu"
    text = SPEC.format(
        model=f"{DENSE.format(**WIDTHS[kind])}, {MODELS[model]}".replace("NARROW", str(WIDTHS[kind]["narrow"])),
        accelerator="cpu" if cpu else accelerator,
        length=64 if cpu else 2048,
        precision="fp32" if cpu else precision,
        parallel=parallel.replace("block", "none") if cpu else parallel,
        kernels=TORCH if cpu else kernels,
    )
    loaded = load_text(text)
    if loaded.spec is None:
        return None, "; ".join(one.message for one in loaded.diagnostics)
    result = make_plan(loaded.spec, base_dir=Path.cwd(), default_name="one-gpu")
    errors = "; ".join(one.message for one in result.diagnostics if one.severity == "error")
    return result.plan, errors


def dry_run(path: Path) -> dict[str, Any]:
    """Return what a plan's dry run says of its one rank, or why it failed."""
    command = [sys.executable, "-c", "from partool.cli.main import run; run()"]
    command += ["plan", str(path), "--verify", "--output", "json"]
    started_s = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRY_RUN_S, cwd=path.parent)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {DRY_RUN_S:.0f} s"}
    if done.returncode or not done.stdout.startswith("{"):
        return {"failed": (done.stdout[-600:] + done.stderr[-600:]).splitlines()[-12:]}
    verification = json.loads(done.stdout)["verification"]
    rank = verification["ranks"][0]
    kept = {name: rank[name] for name in ("peak_bytes", "reserved_bytes", "terms_bytes", "operators")}
    return kept | {"findings": verification["findings"], "seconds": time.perf_counter() - started_s}


def beside(plan: Plan, seen: Mapping[str, Any], dry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's figures: measured, and predicted ones divided by these."""
    memory = plan.prediction.memory
    terms = dict(memory.terms_bytes)
    measured = seen["allocator_of_steps"][0]
    seconds = seen["seconds"][0]
    step_s = statistics.median(seconds[len(seconds) // 2 :])
    found = {
        "losses": seen["losses"][0],
        "host_waits": seen["host_waits"][0],
        "step_s": step_s,
        "first_step_s": seconds[0],
        "planned_step_s": plan.prediction.time.step_time_s,
        "planned_to_measured_step": plan.prediction.time.step_time_s / step_s,
        "mfu": plan.prediction.time.model_flops / step_s / plan.devices.peak_flops if plan.devices.peak_flops else None,
        "outside_bytes": dict(seen["outside_bytes"][0]),
        "planned_terms_bytes": terms,
        "dry_run": dict(dry),
    }
    if not measured:
        return found
    held = seen.get("held_before_bytes", [0])[0]  # by earlier cases of the process
    live, reserved = (measured[f"{kind}_bytes.all.peak"] - held for kind in ("allocated", "reserved"))
    planned = sum(size for term, size in terms.items() if term not in NOT_ALLOCATED)
    idle = min(memory.idle_bytes, max(0, plan.devices.memory_bytes - memory.total_bytes))
    outside = max(found["outside_bytes"].values())
    found |= {
        "allocator": measured,
        "held_before_bytes": held,
        "planned_to_measured_live": planned / live,
        "planned_to_measured_reserved": (planned + terms.get("fragmentation", 0) + idle) / reserved,
        "planned_to_measured_framework": terms.get("framework", 0) / outside,
        "planned_to_measured_whole": (memory.total_bytes + idle) / (reserved + outside),
    }
    if "failed" not in dry:
        found["dry_run_to_measured_live"] = dry["peak_bytes"] / live
        found["dry_run_to_measured_reserved"] = dry["reserved_bytes"] / reserved
    return found


def wrong(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each case that shows a fault or has no result."""
    found = []
    first: dict[str, list[float]] = {}
    for name, case in cases.items():
        if "losses" not in case:
            found.append(f"{name}: no result")
            continue
        want = first.setdefault(CASES[name][0], case["losses"])
        limit = next((each for word, each in MOST_APART.items() if word in name), USUALLY_APART)
        if not all(abs(a - b) <= limit * want[0] for a, b in zip(case["losses"], want, strict=True)):
            found.append(f"{name}: losses {case['losses']} instead of {want}")
        if "failed" in case["dry_run"]:
            found.append(f"{name}: the dry run failed")
    return found


def measure(kind: str, accelerator: str, folder: Path, names: list[str], whole_s: float) -> dict[str, Any]:
    """Run all cases with their dry runs beside them and return the record."""
    until_s = time.monotonic() + whole_s
    plans, refused = {}, {}
    for name in names:
        plan, errors = plan_of(name, kind, accelerator)
        if plan is None:
            refused[name] = errors
            continue
        plans[name] = plan
        (folder / f"{name}.plan.json").write_text(plan.to_json(), encoding="utf-8")
    paths = {name: folder / f"{name}.plan.json" for name in plans}
    environment = {} if kind == "cpu" else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with ThreadPoolExecutor(DRY_RUNS_AT_ONCE if kind == "cuda" else 1) as pool:
        dry = {name: pool.submit(dry_run, path) for name, path in paths.items()}
        seen = run_all(paths, folder / "runs", 1, environment, until_s, steps=STEPS, hang_s=60.0)
        seen.pop("contexts", None)
        cases = {
            name: beside(plans[name], seen[name], dry[name].result()) if "losses" in seen[name] else seen[name]
            for name in plans
        }
    faults = [f"{name} has no plan: {errors}" for name, errors in refused.items()] + wrong(cases)
    return {"machine_of_ranks": machine(kind), "wrong": faults, "cases": cases}


def main() -> None:
    """Measure and print the JSON."""
    parser = argparse.ArgumentParser(description="Predictions beside one GPU.")
    parser.add_argument("--dry", action="store_true", help="on a CPU, to try the script; the figures mean nothing")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="time for everything")
    parser.add_argument("--cases", default="", help="only those with this in their names")
    parser.add_argument("--accelerator", default="auto", help="name of the device in the catalog")
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("tests/bench/one_gpu.py needs a GPU that torch can use; there is none here", file=sys.stderr)
        sys.exit(2)
    names = [name for name in CASES if asked.cases in name]
    with tempfile.TemporaryDirectory() as folder:
        kind = "cpu" if asked.dry else "cuda"
        result = measure(kind, asked.accelerator, Path(folder), names, asked.seconds)
    if asked.dry:
        print(json.dumps(result, indent=2))
    else:
        write("one_gpu", result, "torch", "triton")
    for sentence in result["wrong"]:
        print(sentence, file=sys.stderr)
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()

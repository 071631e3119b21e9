"""Whole training steps: a hand-written FSDP2 loop, eager and compiled, and the trainer with and without kernels."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _kernels_run import Run, judged
from gpu import QUIET, SPEED, bare_s, difference, launch, losses, make_plan

WARMUP_STEPS = 5
FEW = {"optimizer.schedule.warmup_steps": 1, "training.log_every": 1}
REAL = SPEED | FEW | {"model": "llama3.2-1b", "training.steps": 16, "parallel.micro_batch": 8}
DRY = QUIET | FEW | {
    "hardware.accelerator": "cpu", "hardware.per_node": 1, "training.steps": 7,
    "training.sequence_length": 32, "training.global_batch": 2, "parallel.micro_batch": 1,
}  # fmt: skip
LOSSES_APART = 1e-2
"""Largest relative difference of a step's loss between runs that differ in kernels only: both round to bfloat16."""


def whole_steps(run: Run) -> dict[str, Any]:
    """Time the steps of a Llama with 1.2e9 parameters, one run of each kind."""
    found: dict[str, Any] = {"rounds": 1, "warm_up_steps": WARMUP_STEPS}
    compiled = "none" if run.dry else "block"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = _plan(run, folder / "eager", "none", "[]")
        unfused = _plan(run, folder / "compiled", compiled, "[]")
        fused = _plan(run, folder / "fused", compiled, "auto")
        found["fused_parts"] = json.loads(fused.read_text(encoding="utf-8"))["layout"]["derived"]["fused"]
        steps: dict[str, list[dict[str, Any]]] = {}

        def trained(kind: str, plan: Path) -> dict[str, Any]:
            steps[kind] = launch(plan)
            return {"median_s": _median(steps[kind])}

        runs = {
            "trainer, kernels": lambda: trained("fused", fused),
            "bare FSDP2, eager": lambda: {"median_s": bare_s(plain)},
            "bare FSDP2, compiled": lambda: {"median_s": bare_s(unfused)},
            "trainer, no kernels": lambda: trained("unfused", unfused),
        }
        for kind, measure in runs.items():
            found[kind] = run.attempt(kind, measure)
    return found | _compared(run, found, steps)


def _plan(run: Run, folder: Path, compiled: str, fused: str) -> Path:
    settings = DRY if run.dry else REAL
    return make_plan(folder, settings | {"parallel.compile": compiled, "kernels.fused": fused})


def _median(steps: list[dict[str, Any]]) -> float:
    return statistics.median(step["step_time_s"] for step in steps[WARMUP_STEPS:])


def _compared(run: Run, found: dict[str, Any], steps: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    ours = found["trainer, kernels"]
    for kind, goal in (("bare FSDP2, eager", 1.15), ("bare FSDP2, compiled", 1.0), ("trainer, no kernels", 1.0)):
        if ours and found[kind]:
            result[f"against {kind}"] = judged(kind, found[kind]["median_s"] / ours["median_s"], goal)
    if len(steps) == 2:
        apart = difference(losses(steps["fused"]), losses(steps["unfused"]))
        result["losses_apart"] = {"relative": apart, "limit": LOSSES_APART, "met": apart <= LOSSES_APART}
    return result

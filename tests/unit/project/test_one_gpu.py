"""The benchmark of one GPU: every case has a plan, and each fault is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import one_gpu

SOME = ("dense, fp8", "layer norm, compiled", "experts, selective", "latent, ZeRO-3, full")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.long) for name in one_gpu.CASES]
)
def test_every_case_has_a_plan(name: str) -> None:
    for kind in ("cpu", "cuda"):
        plan, errors = one_gpu.plan_of(name, kind, "h100-sxm")
        assert plan is not None, errors
        assert (plan.layout.mesh.world_size, plan.layout.micro_batch) == (1, 4)


def seen(live: int, held: int) -> dict[str, Any]:
    """Return what a rank tells of a case."""
    names = {"allocated_bytes.all.peak": live + held, "reserved_bytes.all.peak": 2 * live + held}
    return {
        "losses": [[2.0, 1.0]],
        "seconds": [[9.0, 1.0, 2.0, 1.0]],
        "host_waits": [2],
        "outside_bytes": [{"before": 5, "steps": 7}],
        "held_before_bytes": [held],
        "allocator_of_steps": [names],
    }


def test_memory_is_compared_without_what_earlier_cases_hold() -> None:
    plan, _ = one_gpu.plan_of("dense, kernels", "cuda", "h100-sxm")
    assert plan is not None
    terms = plan.prediction.memory.terms_bytes
    planned = sum(size for term, size in terms.items() if term not in ("framework", "fragmentation"))
    dry = {"peak_bytes": planned, "reserved_bytes": planned}
    for held in (0, 10**9):
        found = one_gpu.beside(plan, seen(planned, held), dry)
        assert (found["planned_to_measured_live"], found["dry_run_to_measured_live"]) == (1.0, 1.0)
        assert (found["dry_run_to_measured_reserved"], found["step_s"]) == (0.5, 1.5)


def test_faults_are_named() -> None:
    good = {"losses": [10.0, 5.0], "dry_run": {}}
    assert one_gpu.wrong({"dense, torch's operators": good, "dense, compiled": good}) == []
    cases = {
        "dense, torch's operators": good,
        "dense, compiled": good | {"losses": [10.0, 5.3]},
        "dense, fp8": good | {"losses": [10.0, 5.9]},
        "dense, selective": {"failed": ["a line"]},
        "experts, kernels": good | {"losses": [1.0, 0.5], "dry_run": {"failed": ["a line"]}},
        "experts, selective": good | {"losses": [1.0, float("nan")]},
    }
    assert one_gpu.wrong(cases) == [
        "dense, compiled: losses [10.0, 5.3] instead of [10.0, 5.0]",
        "dense, selective: no result",
        "experts, kernels: the dry run failed",
        "experts, selective: losses [1.0, nan] instead of [1.0, 0.5]",
    ]

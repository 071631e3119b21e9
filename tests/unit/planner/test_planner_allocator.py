"""Expandable segments are set for CUDA where the user has not set the allocator, and priced as they are set."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from planned import plan_of

SPEC = """\
model: llama3-8b
hardware: {accelerator: ACCELERATOR, nodes: 1}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 16}
parallel: {data: {zero: 3}, micro_batch: 1, recompute: full, offload: none}
"""
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@cache
def planned(accelerator: str, **env: str) -> Any:
    text = SPEC.replace("ACCELERATOR", accelerator)
    return plan_of(text + (f"launch: {{env: {env}}}\n" if env else ""))


def share(plan: Any) -> float:
    """Return fragmentation as a share of what is allocated."""
    terms = plan.prediction.memory.terms_bytes
    kept = ("fragmentation", "framework", "communication")
    return float(terms["fragmentation"] / sum(size for name, size in terms.items() if name not in kept))


@pytest.mark.parametrize(
    ("accelerator", "env", "set_by_plan", "expandable"),
    [
        ("h100-sxm", {}, True, True),
        ("mi300x", {}, False, False),
        ("h100-sxm", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, False, False),
        ("h100-sxm", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, False, True),
        ("mi300x", {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, False, True),
    ],
)
def test_the_allocators_setting(accelerator: str, env: dict[str, str], set_by_plan: bool, expandable: bool) -> None:
    plan = planned(accelerator, **env)
    found = {variable.name: variable for variable in plan.environment if variable.name in NAMES}
    assert {name: variable.value for name, variable in found.items() if variable.origin != "launch.env"} == (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if set_by_plan else {}
    )
    assert share(plan) == pytest.approx(0.03 if expandable else 0.10, rel=0.2)
    # What idle streams hold is beside it, whatever the setting.
    assert plan.prediction.memory.idle_bytes == planned("h100-sxm").prediction.memory.idle_bytes > 0


def test_a_cpu_has_no_such_setting() -> None:
    text = "model: gpt2\nhardware: {accelerator: cpu, per_node: 1}\ndata: python-stdlib\n"
    text += "training: {sequence_length: 512, global_batch: 4}\n"
    assert all(variable.name not in NAMES for variable in plan_of(text).environment)

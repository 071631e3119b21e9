"""Reasons of plans about expert parallelism."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planned import plan_of

SPEC = """\
model: mixtral-8x7b
hardware: {accelerator: h100-sxm, nodes: 4, per_node: PER_NODE}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 64, steps: 100}
parallel: {data: {zero: 2}, tensor: 1, pipeline: 1, sequence: 1, expert: 8, micro_batch: 1}
"""


def reasons(per_node: int) -> str:
    return "\n".join(plan_of(SPEC.replace("PER_NODE", str(per_node)), folder=Path("specs")).reasons)


def test_experts_inside_a_node_are_said_to_be() -> None:
    found = reasons(8)
    assert "Experts over 8 ranks, inside one node: each rank holds 1 of a layer's experts" in found
    assert "travels once per expert" not in found


def test_both_ways_between_nodes_are_priced() -> None:
    found = reasons(4)
    assert "Experts over 8 ranks, over 2 nodes" in found
    said = re.search(r"would take ([0-9.e-]+) s instead of ([0-9.e-]+) s, and the step ([0-9.]+)% less", found)
    assert said is not None
    # Two experts drawn at random of two nodes are on 1.5 nodes in the mean.
    assert float(said[1]) / float(said[2]) == pytest.approx(0.75, rel=0.03)
    assert 0 < float(said[3]) < 50

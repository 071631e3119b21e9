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


def reasons(per_node: int, length: int = 4096) -> str:
    spec = SPEC.replace("PER_NODE", str(per_node)).replace("sequence_length: 4096", f"sequence_length: {length}")
    return "\n".join(plan_of(spec, folder=Path("specs")).reasons)


def test_experts_inside_a_node_are_said_to_be() -> None:
    found = reasons(8)
    assert "Experts over 8 ranks, inside one node: each rank holds 1 of a layer's experts" in found
    assert "travels once per expert" not in found


def once(length: int) -> float:
    """Return the seconds of tokens sent once per node relative to those sent once per expert, as told."""
    found = reasons(4, length)
    assert "Experts over 8 ranks, over 2 nodes" in found
    said = re.search(r"would take ([0-9.e-]+) s instead of ([0-9.e-]+) s, and the step ([0-9.]+)% less", found)
    assert said is not None
    assert 0 < float(said[3]) < 50
    return float(said[1]) / float(said[2])


def test_both_ways_between_nodes_are_priced() -> None:
    # Two experts drawn at random of two nodes are on 1.5 nodes in the mean. Kernels that send a token once reach 0.73
    # of an adapter's rate between two nodes, an all-to-all reaches 0.85, and starts sooner.
    assert once(32768) == pytest.approx(0.75 * 0.85 / 0.73, rel=0.01)
    assert once(32768) < once(4096) < 1.0

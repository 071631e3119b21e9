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
training: {sequence_length: 4096, global_batch: 96, steps: 100}
parallel: {data: {zero: 2}, tensor: 1, pipeline: 1, sequence: 1, expert: 8, micro_batch: 1}
"""


def reasons(per_node: int, length: int = 4096, exchange: str = "auto") -> str:
    spec = SPEC.replace("PER_NODE", str(per_node)).replace("expert: 8", f"expert: 8, expert_exchange: {exchange}")
    spec = spec.replace("sequence_length: 4096", f"sequence_length: {length}")
    return "\n".join(plan_of(spec, folder=Path("specs")).reasons)


def test_experts_inside_a_node_are_said_to_be() -> None:
    found = reasons(8)
    assert "Experts over 8 ranks, inside one node: each rank holds 1 of a layer's experts" in found
    assert "travels once per expert" not in found


def seconds(length: int, exchange: str = "auto") -> dict[str, float]:
    """Return the seconds of tokens that reasons tell, by exchange; the first is that of the layout."""
    text = " ".join(reasons(4, length, exchange).split())
    assert "Experts over 8 ranks, over 2 nodes" in text
    chosen = re.search(r"expert_exchange: (\w+): .*? Tokens take ([0-9.e-]+) s of the step, with (\w+) (\S+) s", text)
    assert chosen is not None
    prices = {chosen[1]: float(chosen[2]), chosen[3]: float(chosen[4])}
    summed = re.search(r"node_first_summed, whose sums .*? would take ([0-9.e-]+) s", text)
    return prices | ({} if summed is None else {"node_first_summed": float(summed[1])})


def test_exchanges_between_nodes_are_priced() -> None:
    # Two of eight experts are on both of two nodes with probability 4/7: 11/7 nodes have one of them, half of these the
    # other one, where today's exchange sends one row of two. Results return in as many rows as there, unless summed.
    direct = seconds(32768)
    assert next(iter(direct)) == "direct"
    by_node = seconds(32768, "node_first")
    assert by_node["direct"] == direct["direct"]
    assert by_node["node_first"] == direct["node_first"]
    between = 11 / 14
    inside_s = by_node["node_first"] - direct["direct"] * (1 + between) / 2
    assert inside_s > 0
    assert direct["node_first_summed"] == pytest.approx(direct["direct"] * between + inside_s, rel=0.02)


def test_ranks_that_fill_no_nodes_have_one_exchange() -> None:
    assert "these ranks do not fill nodes" in " ".join(reasons(6).split())

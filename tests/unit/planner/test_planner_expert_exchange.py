"""How tokens travel between nodes: findings, the planner's choice, and that what it prints allows this choice only."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned import plan_of

from partool.plan.as_spec import own_yaml
from partool.planner import make_plan
from partool.spec import load_text

SPEC = """\
model: {layers: 2, hidden: 2048, heads: 16, vocab: 512, moe: {experts: 16, top_k: 8, ffn_hidden: 512}}
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 16, steps: 10}
parallel: {data: {zero: 1}, tensor: 1, pipeline: 1, sequence: 1, micro_batch: 1, FIELDS}
"""


@pytest.mark.parametrize(
    ("fields", "words", "help"),
    [
        ("expert: 8, expert_exchange: node_first", "8 expert ranks of the 16 devices do not", "use expert: 16, or"),
        ("expert: 1, expert_exchange: node_first_summed", "no ranks share experts", "use direct, or auto"),
        ("expert: 4, expert_tensor: 2, expert_exchange: node_first", "8 expert ranks of", "use expert: 8, or"),
    ],
)
def test_ranks_that_cannot_send_by_node_are_a_finding(fields: str, words: str, help: str) -> None:
    loaded = load_text(SPEC.replace("FIELDS", fields))
    assert loaded.spec is not None
    made = make_plan(loaded.spec, base_dir=Path("specs"), default_name="spec")
    (found,) = (one for one in made.diagnostics if one.severity == "error")
    assert (found.code, found.path) == ("PT438", ("parallel", "expert_exchange"))
    assert words in found.message
    assert (found.help or "").startswith(help)


def test_eight_choices_cross_to_two_nodes_once_and_four_devices_of_one_node_have_one_exchange() -> None:
    """The planner's choice has the bits of one exchange of all ranks; a search that is free finds ranks for a wish."""
    plan = plan_of(SPEC.replace("FIELDS", "expert: 16"), folder=Path("specs"))
    assert plan.layout.expert_exchange == "node_first"
    text = " ".join(" ".join(plan.reasons).split())
    assert "expert_exchange: node_first: a token crosses once to each node of its experts" in text
    printed = own_yaml(plan)
    assert "expert_exchange: node_first" in printed
    direct = plan_of(SPEC.replace("FIELDS", "expert: 16, expert_exchange: direct"), folder=Path("specs"))
    # Eight choices reach four experts' worth of rows on the other node directly, one crossing row by node, and as many
    # rows return.
    ratio = plan.prediction.time.traffic_bytes["expert"] / direct.prediction.time.traffic_bytes["expert"]
    assert ratio == pytest.approx((2 * (1 + 4) + 2 * 2 * 7) / (4 * 7.5), rel=0.02)
    open_ = plan_of(SPEC.replace("FIELDS", "expert_exchange: node_first_summed"), folder=Path("specs"))
    assert (open_.layout.expert_ranks, open_.layout.expert_exchange) == (16, "node_first_summed")

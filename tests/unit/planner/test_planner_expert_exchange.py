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
        ("expert: 1, expert_exchange: padded", "no ranks share experts", "use direct, or auto"),
        ("expert: 8, expert_rank_capacity: 1.5", "limits the rows of expert_exchange: padded", "write expert_exchange"),
    ],
)
def test_exchanges_that_the_ranks_cannot_make_are_a_finding(fields: str, words: str, help: str) -> None:
    loaded = load_text(SPEC.replace("FIELDS", fields))
    assert loaded.spec is not None
    made = make_plan(loaded.spec, base_dir=Path("specs"), default_name="spec")
    (found,) = (one for one in made.diagnostics if one.severity == "error")
    field = "expert_rank_capacity" if "expert_rank_capacity" in fields else "expert_exchange"
    assert (found.code, found.path) == ("PT438", ("parallel", field))
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


def test_padded_rows_are_planned_priced_and_printed() -> None:
    """Without a capacity there is a row for every choice of a rank on every rank, so that none is dropped."""
    padded = "expert: 4, expert_exchange: padded"
    direct, every, some = (
        plan_of(SPEC.replace("FIELDS", fields), folder=Path("specs"))
        for fields in ("expert: 4, expert_exchange: direct", padded, f"{padded}, expert_rank_capacity: 1.5")
    )
    assert (direct.layout.expert_rank_capacity, every.layout.expert_rank_capacity) == (None, 4.0)
    assert "expert_rank_capacity: 1.5" in own_yaml(some)
    sent = [plan.prediction.time.traffic_bytes["expert"] for plan in (direct, some, every)]
    assert sent[1] / sent[0] == pytest.approx(1.5, rel=0.01)
    assert sent[2] / sent[0] == pytest.approx(4.0, rel=0.01)
    memory = [plan.prediction.memory.terms_bytes["activations"] for plan in (some, every)]
    assert memory[0] < memory[1]
    text = " ".join(" ".join(some.reasons).split())
    assert "each rank sends each 1.5 times an even share of rows; choices beyond are dropped and counted" in text
    assert "no choice is dropped" in " ".join(" ".join(every.reasons).split())

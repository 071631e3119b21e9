"""Ranks that hold parts of experts: findings, the sizes a search tries, and what the cost model makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from planned import plan_of

from partool.catalog.hardware import resolve_hardware
from partool.catalog.models import resolve_model
from partool.cost.case import Layouts
from partool.cost.tensor_shares import share_columns
from partool.cost.training.peak import predict_memory
from partool.cost.training.traffic import traffic_bytes
from partool.layout.gemms import gemms
from partool.plan.as_spec import own_yaml
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.planner.forms.experts import forms
from partool.planner.problem import Problem
from partool.spec import load_text
from partool.work.training import TrainingWork

SPEC = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 512, moe: {experts: 4, top_k: 2, ffn_hidden: 48, routing: balanced}}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {sequence_length: 64, global_batch: 16, steps: 10}
parallel: {FIELDS}
"""
FIXED = "data: {zero: 1}, pipeline: 1, sequence: 1, micro_batch: 1, recompute: none, offload: none"


def problem_of(fields: str) -> Problem:
    loaded = load_text(SPEC.replace("FIELDS", fields))
    assert loaded.spec is not None
    model = resolve_model(loaded.spec.model, Path("specs")).config
    devices = resolve_hardware(loaded.spec.hardware, loaded.spec.training.precision).devices
    assert model is not None
    assert devices is not None
    return Problem(loaded.spec, model, devices)


def planned(fields: str) -> Plan:
    return plan_of(SPEC.replace("FIELDS", f"{FIXED}, {fields}"), folder=Path("specs"))


@pytest.mark.parametrize(
    ("fields", "field", "words", "help"),
    [
        ("expert: 2, expert_tensor: 49", "expert_tensor", "expert's inner width of 48", "use 24 or 48"),
        ("expert: 4, expert_tensor: 4", "expert_tensor", "expert: 4 × expert_tensor: 4 = 16 does not", "use 1 or 2"),
        ("expert: 2, expert_tensor: 3", "expert_tensor", "= 6 does not divide the 8 devices", "use 2 or 4"),
        ("expert_tensor: 3", "expert_tensor", "expert_tensor: 3 does not divide the 8 devices", "use 2 or 4"),
        ("expert: 4, expert_tensor: 2, pipeline: 2", "expert_tensor", "the 4 devices of a pipeline stage", "use 1"),
        ("expert: 8, pipeline: 4", "expert", "4 experts cannot be split", "use 1 or 2"),
        ("expert: 4, pipeline: 4", "expert", "does not divide the 2 devices of a pipeline stage", "use 1 or 2"),
        (
            "expert: 2, expert_tensor: 4, tensor: 1, pipeline: 1, sequence: 1, data: {zero: 1, shard: 4}",
            "expert_tensor", "the 4 ranks that share one copy", "use 1 or 2",
        ),
        ("expert: 1, expert_tensor: 2, tensor: 4", "expert_tensor", "the 4 tensor ranks hold the parts", "use 4, or"),
        ("expert: 2, expert_tensor: 2, data: {zero: 0}", "expert", "needs ZeRO 1, 2 or 3", "use data: {zero: 1}"),
    ],
)  # fmt: skip
def test_illegal_sizes_are_findings(fields: str, field: str, words: str, help: str) -> None:
    loaded = load_text(SPEC.replace("FIELDS", fields))
    assert loaded.spec is not None
    found = next(
        one
        for one in make_plan(loaded.spec, base_dir=Path("specs"), default_name="spec").diagnostics
        if one.code == "PT266"
    )
    assert (found.path, found.severity) == (("parallel", field), "error")
    assert words in found.message
    assert (found.help or "").startswith(help)


def test_tensor_ranks_alone_share_experts_from_stage_1_on() -> None:
    """Without data-parallel ranks, nothing else is shared; no finding speaks against the stage, and no reason lies."""
    for zero in ("auto", "1"):
        loaded = load_text(
            SPEC.replace("FIELDS", f"tensor: 4, pipeline: 2, sequence: 1, expert: 4, data: {{zero: {zero}}}")
        )
        assert loaded.spec is not None
        made = make_plan(loaded.spec, base_dir=Path("specs"), default_name="spec")
        assert made.plan is not None, made.diagnostics
        assert (made.plan.layout.expert, made.plan.layout.data.zero, made.plan.layout.mesh.dp) == (4, 1, 1)
        assert "PT268" not in {one.code for one in made.diagnostics}
        assert not any("would not fit" in reason for reason in made.plan.reasons if reason.startswith("ZeRO"))


def test_a_dense_model_has_no_parts_of_experts() -> None:
    text = SPEC.replace(", moe: {experts: 4, top_k: 2, ffn_hidden: 48, routing: balanced}", "")
    loaded = load_text(text.replace("FIELDS", "expert_tensor: 2"))
    assert loaded.spec is not None
    found = make_plan(loaded.spec, base_dir=Path("specs"), default_name="spec").diagnostics
    assert [(one.code, one.path[-1], one.help) for one in found if one.severity == "error"] == [
        ("PT266", "expert_tensor", "drop it, or choose a model with experts")
    ]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("n_routed_experts", "model.moe.experts"), ("scoring_func", "model.moe.scores"),
        ("norm_topk_prob", "model.moe.normalise"), ("moe_router_topk", "model.moe.top_k"),
    ],
)  # fmt: skip
def test_names_of_routers_elsewhere_lead_to_their_fields(name: str, path: str) -> None:
    found = load_text(SPEC.replace("routing: balanced", f"{name}: 2").replace("FIELDS", "expert: 2")).diagnostics
    assert [one.help for one in found] == [f"here that is `{path}`"]


@pytest.mark.parametrize("name", ["etp", "expert_tensor_parallel_size"])
def test_names_of_other_tools_lead_to_the_field(name: str) -> None:
    found = load_text(SPEC.replace("FIELDS", f"{name}: 2")).diagnostics
    assert any("parallel.expert_tensor" in (one.help or "") for one in found)


@pytest.mark.parametrize(
    ("fields", "tensor", "ranks", "expected"),
    [
        ("expert: auto", 2, 8, [(1, 1), (2, 1), (4, 1), (4, 2)]),  # a rank with one expert leaves only its width to cut
        ("expert: auto", 2, 4, [(1, 1), (2, 1), (4, 1)]),
        ("expert: 2", 1, 8, [(2, 1)]),
        ("expert_tensor: 2", 1, 8, [(2, 2), (4, 2)]),
        ("expert_tensor: 2", 2, 8, [(1, 1), (2, 2), (4, 2)]),
        ("expert: 1, expert_tensor: 4", 2, 8, []),
        ("expert_tensor: 1", 2, 8, [(2, 1), (4, 1)]),
    ],
)
def test_sizes_that_a_search_tries(fields: str, tensor: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    assert forms(problem_of(fields), tensor, ranks) == expected


def test_a_plan_with_parts_is_told_and_planned_again() -> None:
    plan = planned("tensor: 2, expert: 2, expert_tensor: 2")
    assert (plan.layout.expert, plan.layout.expert_tensor, plan.layout.expert_ranks) == (2, 2, 4)
    said = "\n".join(plan.reasons)
    assert "Experts over 4 ranks, inside one node: each rank holds one of 2 parts of 2 of a layer's experts" in said
    document = yaml.safe_load(SPEC.replace("FIELDS", "")) | yaml.safe_load(own_yaml(plan))
    assert plan_of(yaml.safe_dump(document), folder=Path("specs")).layout == plan.layout


def test_parts_are_sent_all_rows_and_hold_less() -> None:
    whole, halves = (planned(f"tensor: 1, expert: 2, expert_tensor: {parts}") for parts in (1, 2))
    job = TrainingWork(whole.model, whole.devices, 64, whole.training.precision, global_batch=16)
    tokens, layers, hidden = 64, 2, 64
    accumulation = whole.layout.derived.accumulation
    for plan, ranks, parts in ((whole, 2, 1), (halves, 4, 2)):
        rows = tokens * 2 * parts * (ranks - 1) // ranks
        counts = 8 * 4 * parts * (ranks - 1) // ranks
        sent = traffic_bytes(job, plan.layout)["expert"]
        assert sent == accumulation * layers * (4 * rows * hidden * job.compute_bytes + counts)
    assert share_columns(job, Layouts(ep=2, etp=2)).layers[1][1] * 2 == share_columns(job, Layouts(ep=2)).layers[1][1]
    # Seven of thirteen widths are on the fuller of two ranks.
    odd = job.model.model_copy(update={"moe": job.model.moe.model_copy(update={"ffn_hidden": 13})})
    uneven = TrainingWork(odd, whole.devices, 64, whole.training.precision, global_batch=16)
    assert share_columns(uneven, Layouts(ep=2, etp=2)).layers[1][1] == 3 * 2 * 7 * hidden
    memory = [predict_memory(job, plan.layout, 0.0).terms_bytes for plan in (whole, halves)]
    assert memory[1]["parameters"] == memory[0]["parameters"]  # all ranks share all masters either way
    assert memory[1]["gathered"] < memory[0]["gathered"]
    assert memory[1]["activations"] > memory[0]["activations"]


def test_products_of_parts_are_narrower_and_have_as_many_rows() -> None:
    model = planned("tensor: 1, expert: 2").model
    up = {
        parts: next(one for one in gemms(model, tensor=1, expert=2, expert_tensor=parts, tokens=64) if one.name == name)
        for parts in (1, 2)
        for name in ("moe.experts.gate, up",)
    }
    assert (up[1].n, up[2].n, up[1].groups, up[2].groups) == (48, 24, 2, 2)
    assert up[2].rows.mean == 2 * up[1].rows.mean == 2 * 64 * 2 / 2

"""Plans of models with adapters: what is trained, stored, priced and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from often import often

from partool.layout.adapters import is_adapter
from partool.layout.parameters import count, is_frozen, parameters
from partool.plan.types import Plan
from partool.planner.make import PlanResult, make_plan
from partool.report.plan_rows import job_rows
from partool.spec.spec import Spec

ONE = {
    "model": {"preset": "llama3-8b"},
    "hardware": {"accelerator": "h100-sxm", "per_node": 1},
    "training": {"sequence_length": 2048, "global_batch": 8, "steps": 10},
    "data": {"source": "python-stdlib"},
}  # fmt: skip


def result(tmp_path: Path, **changes: Any) -> PlanResult:
    document = yaml.safe_load(yaml.safe_dump(ONE | changes))
    return make_plan(Spec.model_validate(document), base_dir=tmp_path, default_name="x")


def planned(tmp_path: Path, **changes: Any) -> Plan:
    made = result(tmp_path, **changes)
    assert made.plan is not None, made.diagnostics
    return made.plan


PINNED = {"parallel": {"micro_batch": 1, "recompute": "none", "offload": {"optimizer": "none"}, "data": {"zero": 0}}}


def test_states_are_those_of_the_adapter(tmp_path: Path) -> None:
    """Weights of 2 bytes, and masters, moments and gradients of what is trained only."""
    plan = planned(tmp_path, adapter={"rank": 16}, **PINNED)
    infos = parameters(plan.model)
    added = count(info for info in infos if is_adapter(info.name))
    # Of a layer: r · (I + O) of q, k, v, o, gate, up and down.
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert added == 32 * 16 * widths
    assert added == count(info for info in infos if not is_frozen(info.name, plan.frozen))
    terms = plan.prediction.memory.terms_bytes
    assert terms["parameters"] == pytest.approx(2 * (count(infos) - added) + 4 * added, rel=1e-3)
    assert terms["optimizer"] == pytest.approx(8 * added, rel=1e-3)
    assert terms["gathered"] <= 2 * added
    assert plan.runnable
    totals = plan.prediction.totals
    assert totals is not None
    assert totals.checkpoint_bytes == 12 * added


def test_frozen_matrices_have_no_gradients(tmp_path: Path) -> None:
    """Backward, an adapter's run multiplies about as much as forward, a run of all weights twice as much."""
    plan = planned(tmp_path, adapter="lora", **PINNED)
    times = plan.prediction.time.terms_s
    assert 0.9 < times["backward"] / times["forward"] < 1.4
    pinned = PINNED["parallel"] | {"offload": "auto", "data": {"zero": "auto"}}
    whole = planned(tmp_path, parallel=pinned).prediction.time
    assert plan.prediction.time.model_flops == pytest.approx(whole.model_flops * 2 / 3, rel=0.05)


def test_larger_ranks_cost_more(tmp_path: Path) -> None:
    few, many = (planned(tmp_path, adapter={"rank": rank}, **PINNED).prediction for rank in (8, 256))
    assert few.time.step_time_s < many.time.step_time_s
    assert few.memory.total_bytes < many.memory.total_bytes
    assert few.memory.terms_bytes["activations"] < many.memory.terms_bytes["activations"]


def test_dora_costs_its_norms_and_its_results(tmp_path: Path) -> None:
    """Magnitudes have masters and moments; norms and scaled results take time, the results before it memory."""
    lora, dora = (planned(tmp_path, adapter={"kind": kind}, **PINNED) for kind in ("lora", "dora"))
    magnitudes = count(info for info in parameters(dora.model) if info.name.endswith(".magnitude"))
    assert magnitudes == 32 * (4 * 4096 - 2 * 3072 + 2 * 14336 + 4096)
    terms, before = (plan.prediction.memory.terms_bytes for plan in (dora, lora))
    assert terms["optimizer"] - before["optimizer"] == pytest.approx(8 * magnitudes, rel=1e-3)
    # Of each projection the result is kept, in bf16, of 2,048 tokens.
    assert terms["activations"] - before["activations"] == pytest.approx(2 * 2048 * magnitudes, rel=0.05)
    assert 1.02 < dora.prediction.time.step_time_s / lora.prediction.time.step_time_s < 1.5


def test_dropout_of_elements_costs_hashes_where_blocks_are_not_compiled(tmp_path: Path) -> None:
    times = {}
    for compile in ("none", "block"):
        pinned = {"parallel": PINNED["parallel"] | {"compile": compile}}
        kept, dropping = (planned(tmp_path, adapter={"dropout": rate}, **pinned) for rate in (0.0, 0.1))
        times[compile] = dropping.prediction.time.step_time_s / kept.prediction.time.step_time_s
    assert 1.0 < times["block"] < times["none"]


@pytest.mark.parametrize("ranks", often([2, 8], [2]))
def test_searches_choose_what_runs(tmp_path: Path, ranks: int) -> None:
    plan = planned(tmp_path, adapter="lora", hardware={"accelerator": "h100-sxm", "per_node": ranks})
    assert plan.runnable
    assert plan.layout.tensor.overlap == "none"


def test_b_may_learn_faster(tmp_path: Path) -> None:
    plan = planned(tmp_path, adapter={"lr_ratio": 4.0}, optimizer={"groups": {"layers.0.*": {"lr_factor": 0.5}}})
    assert [(name, group.lr_factor) for name, group in plan.optimizer.groups.items()] == [
        ("layers.0.*", 0.5), ("*.lora_b", 4.0),
    ]  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan


def test_the_plan_names_the_adapter(tmp_path: Path) -> None:
    row = dict(job_rows(planned(tmp_path, adapter={"targets": ["q", "v"], "train": ["norms"]})))["Adapter"]
    assert row.startswith("lora, rank 16, scale 2, on q, v and norms: ")
    assert "(0.088%)" in row


def test_plans_without_an_adapter_are_as_before(tmp_path: Path) -> None:
    assert "adapter" not in planned(tmp_path).model.model_dump()


@pytest.mark.parametrize(
    ("adapter", "code", "path"),
    [
        ({"targets": ["q", "querys"]}, "PT293", ("adapter", "targets", 1)),
        ({"train": ["embed", "layers.99.*"]}, "PT293", ("adapter", "train", 1)),
    ],
)
def test_patterns_that_match_nothing_are_found(tmp_path: Path, adapter: Any, code: str, path: Any) -> None:
    findings = result(tmp_path, adapter=adapter).diagnostics
    assert [(finding.code, finding.path) for finding in findings] == [(code, path)]


def test_a_frozen_adapter_is_found(tmp_path: Path) -> None:
    model = {"preset": "llama3-8b", "frozen": ["*.lora_?"]}
    assert [finding.code for finding in result(tmp_path, model=model, adapter="lora").diagnostics] == ["PT623"]

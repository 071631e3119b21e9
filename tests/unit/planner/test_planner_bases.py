"""Plans of adapters beside bases of 4 and 8 bits: bytes, seconds, rules, and what ``adapter: auto`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from often import often
from test_planner_adapter import ONE, PINNED, planned, result

from partool.cost.training.traffic import traffic
from partool.layout.parameters import count, parameters
from partool.layout.quantised import quantised_names
from partool.planner.cost_job import cost_job
from partool.planner.resolve import resolve
from partool.report.plan_rows import job_rows
from partool.spec.spec import Spec

BITS = {"int8": (8.0, 32 / 4096), "nf4": (4.0, (8 + 32 / 256) / 64), "single": (4.0, 32 / 64)}
"""Bits of an element's code, and of its share of scales."""


def base(name: str, **fields: Any) -> dict[str, Any]:
    single = {"double_quant": False} if name == "single" else {}
    return {"rank": 16, "base": "nf4" if name == "single" else name} | single | fields


@pytest.mark.parametrize("name", often(BITS, ["nf4"]))
def test_parameters_are_those_that_are_stored(tmp_path: Path, name: str) -> None:
    plan = planned(tmp_path, adapter=base(name), **PINNED)
    wide = planned(tmp_path, adapter=base("bf16"), **PINNED)
    names, infos = quantised_names(plan.model, plan.frozen), parameters(plan.model)
    elements = count(info for info in infos if info.name in names)
    assert elements == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = wide.prediction.memory.terms_bytes["parameters"] - plan.prediction.memory.terms_bytes["parameters"]
    code, scale = BITS[name]
    # Rows of `down` are longer, which leaves fewer scales of rows.
    assert saved == pytest.approx(elements * (16 - code - scale) / 8, rel=2e-4)
    states = (each.prediction.memory.terms_bytes["optimizer"] for each in (plan, wide))
    assert next(states) == pytest.approx(next(states), rel=1e-6)
    row = dict(job_rows(plan))["Adapter"]
    assert f"projections in {'nf4' if name == 'single' else name}" in row


def test_conversions_take_time_and_the_memory_of_a_matrix(tmp_path: Path) -> None:
    wide, few = (planned(tmp_path, adapter=base(name), **PINNED).prediction for name in ("bf16", "nf4"))
    for term in ("forward", "backward"):
        # Codes are read and numbers are written once per pass, at about 3 TB/s and the rate of kernels.
        least = 8 * 32 * 218e6 * 2.5 / 3.4e12
        assert least < few.time.terms_s[term] - wide.time.terms_s[term] < 5 * least
    more = few.memory.terms_bytes["activations"] - wide.memory.terms_bytes["activations"]
    assert more == pytest.approx(2 * 4096 * 14336, rel=0.01)


def test_zero_3_gathers_the_bytes_of_the_codes(tmp_path: Path) -> None:
    machines = {"hardware": {"accelerator": "h100-sxm", "per_node": 2}}
    pinned = {"micro_batch": 1, "recompute": "none", "data": {"zero": 3, "shard": 2}, "tensor": {"degree": 1}}
    sent = {}
    for name in ("bf16", "nf4"):
        document = ONE | machines | {"adapter": base(name), "parallel": pinned}
        resolved = resolve(Spec.model_validate(document), tmp_path)
        assert resolved.problem is not None, resolved.diagnostics
        plan = planned(tmp_path, adapter=base(name), parallel=pinned, **machines)
        sent[name] = traffic(cost_job(resolved.problem), plan.layout).gather_bytes
        gather = plan.prediction.memory.terms_bytes
        assert gather["parameters"] < 2e10
    elements, others = 32 * 218.1e6, 2 * 128256 * 4096
    assert sent["nf4"] / sent["bf16"] == pytest.approx(
        (0.516 * elements + 2 * others) / (2 * (elements + others)), rel=0.1
    )


def codes(made: Any) -> list[str]:
    return [finding.code for finding in made.diagnostics if finding.severity == "error"]


def test_dora_has_a_base_that_is_stored_as_a_matrix(tmp_path: Path) -> None:
    assert codes(result(tmp_path, adapter={"kind": "dora", "base": "nf4"})) == ["PT412"]


def test_settings_without_effect_are_found(tmp_path: Path) -> None:
    assert codes(result(tmp_path, adapter={"base": "int8", "double_quant": False})) == ["PT299"]
    assert codes(result(tmp_path, adapter={"double_quant": True})) == ["PT299"]


WAYS = {
    # accelerator, adapter → what is taken, and how many ways were tried before
    "all weights": ({"accelerator": "b200", "per_node": 1}, {"kind": "auto"}, None, 0),
    "bf16": ({"accelerator": "h100-sxm", "per_node": 1}, {"kind": "auto", "rank": 8}, "bf16", 1),
    "nf4": ({"accelerator": "rtx-4090", "per_node": 1}, {"kind": "auto", "rank": 256}, "nf4", 3),
    "asked": ({"accelerator": "h100-sxm", "per_node": 1}, {"kind": "auto", "base": "int8"}, "int8", 1),
    "started": ({"accelerator": "b200", "per_node": 1}, {"kind": "auto", "weights": "adapter"}, "bf16", 0),
}


@pytest.mark.parametrize("name", often(WAYS, ["bf16"]))
def test_auto_takes_the_first_way_that_fits(tmp_path: Path, name: str) -> None:
    machines, adapter, expected, before = WAYS[name]
    parallel = {"offload": {"optimizer": "none", "parameters": "none", "activations": "none"}}
    plan = planned(tmp_path, adapter=adapter, hardware=machines, parallel=parallel)
    if expected is None:
        assert plan.adapter is None
        assert plan.model.adapter is None
        assert plan.frozen == ()
    else:
        assert plan.adapter is not None
        assert plan.model.adapter is not None
        assert (plan.adapter.kind, plan.adapter.base, plan.model.adapter.base) == ("lora", expected, expected)
        assert plan.adapter.rank == adapter.get("rank", 16)
    sentence = plan.reasons[0]
    assert sentence.startswith("adapter: auto takes ")
    assert sentence.count(" needs at least ") == before
    assert f"({plan.prediction.memory.total_bytes / 2**30:.1f} of " in sentence
    assert plan.spec["adapter"]["kind"] == "auto"


def test_auto_plans_what_the_way_itself_gives(tmp_path: Path) -> None:
    """The same layout and prices as a spec that names it, and the hash of the spec that the user wrote."""
    auto, named = (planned(tmp_path, adapter=each, **PINNED) for each in ("auto", "lora"))
    assert (auto.layout, auto.prediction, auto.frozen) == (named.layout, named.prediction, named.frozen)
    assert auto.inputs["spec"] != named.inputs["spec"]
    assert auto.model_dump(exclude={"reasons", "inputs", "spec"}) == named.model_dump(
        exclude={"reasons", "inputs", "spec"}
    )


@pytest.mark.long
def test_where_nothing_fits_all_sizes_are_told(tmp_path: Path) -> None:
    parallel = {"offload": {"optimizer": "none", "parameters": "none", "activations": "none"}}
    machines = {"accelerator": "rtx-4090", "per_node": 1}
    made = result(tmp_path, model={"preset": "llama3-70b"}, adapter="auto", hardware=machines, parallel=parallel)
    (finding,) = [each for each in made.diagnostics if each.severity == "error"]
    assert finding.code == "PT298"
    assert finding.message.count("needs at least") == 4

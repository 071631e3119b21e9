"""Pyramids of experts: plans price each layer by its experts, and findings name the layers that cannot be."""

from __future__ import annotations

import pytest
from planned import findings_of, plan_of

from partool.plan.types import Plan

SPEC = """
model: {layers: 4, hidden: 512, heads: 8, vocab: 4096, position: none, moe: {MOE}}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {sequence_length: 512, global_batch: 32, steps: 3, precision: bf16}
parallel: {data: {zero: 1, shard: 8}, tensor: 1, sequence: 1, pipeline: {stages: 1}, micro_batch: 2, recompute: none,
  compile: none, expert: 4, tiles: {mlp: 0, loss: 0},
  offload: {optimizer: none, parameters: none, activations: none}}
"""
FEW, MANY = "experts: 8, top_k: 2, ffn_hidden: 256", "experts: 16, top_k: 1, ffn_hidden: 320, normalise: false"
OTHERS = "normalise: false, layers: {LAYERS: {experts: 16, top_k: 1, ffn_hidden: 320}}"


def planned(moe: str) -> Plan:
    return plan_of(SPEC.replace("MOE", moe))


def pyramid(layers: str) -> Plan:
    """Return the plan of a model with ``MANY`` experts in some layers, and ``FEW`` in the others."""
    return planned(f"{FEW}, {OTHERS.replace('LAYERS', layers)}")


def test_layers_that_are_alike_are_priced_as_if_nothing_were_said_by_layer() -> None:
    assert planned(f"{FEW}, layers: {{2: {{experts: 8}}}}").prediction == planned(FEW).prediction
    assert pyramid("0-3").prediction == planned(MANY).prediction


def test_a_pyramid_of_two_halves_has_the_mean_of_both_prices() -> None:
    """Everything that is a sum over layers is exactly half of each; the gathered block is the largest one."""
    few, many, half = (plan.prediction for plan in (planned(FEW), planned(MANY), pyramid("1-2")))
    for terms in ("parameters", "gathered", "gradients", "optimizer", "activations"):
        low, high, between = (one.memory.terms_bytes[terms] for one in (few, many, half))
        assert low != high
        assert between == pytest.approx((low + high) / 2, rel=1e-6), terms
    for term in ("gradient_sync", "parameter_gather", "expert"):
        low, high, between = (one.time.traffic_bytes[term] for one in (few, many, half))
        assert low != high
        assert between == pytest.approx((low + high) / 2, abs=1.0), term
    for term in ("matmul_forward", "matmul_backward", "elementwise_backward", "expert_parallel", "launch"):
        low, high, between = (one.time.breakdown_s[term] for one in (few, many, half))
        assert between == pytest.approx((low + high) / 2, rel=1e-9), term
    assert half.time.model_flops == pytest.approx((few.time.model_flops + many.time.model_flops) / 2)
    assert half.memory.saved_block_bytes == max(few.memory.saved_block_bytes, many.memory.saved_block_bytes)


@pytest.mark.parametrize(
    ("layers", "code", "path", "says"),
    [
        ('"2-9": {experts: 16}', "PT413", "2-9", "use layers 0 to 3"),
        ("2-3: {experts: 6}", "PT266", "", "6 experts cannot be split over expert: 4"),
        ("2-3: {experts: 1}", "PT210", "2-3.experts", "use 2 or more"),
        ("2-3: {}", "PT413", "2-3", "says nothing about its layers"),
        ("1-2: {experts: 16}, 2: {top_k: 1}", "PT413", "2", "name each layer once"),
        ("last: {experts: 16}", "PT413", "last", "range with the lower layer first"),
    ],
)
def test_layers_that_cannot_be_are_findings(layers: str, code: str, path: str, says: str) -> None:
    text = SPEC.replace("MOE", f"{FEW}, layers: {{{layers}}}")
    (found,) = [each for each in findings_of(text) if each.severity == "error"]
    place = f"model.moe.layers.{path}" if path else "parallel.expert"
    assert (found.code, ".".join(map(str, found.path))) == (code, place)
    assert says in f"{found.message} {found.help}"


def test_ranks_that_share_experts_divide_those_of_every_layer() -> None:
    plan = plan_of(SPEC.replace("MOE", f"{FEW}, layers: {{2-3: {{experts: 12}}}}").replace("expert: 4", "expert: auto"))
    assert 12 % plan.layout.expert == 0 == 8 % plan.layout.expert

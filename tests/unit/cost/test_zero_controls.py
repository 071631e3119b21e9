"""Ways to gather parameters: their costs, the planner's choice, and cases of short memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from _expected_traffic import gathers, kept_bytes, padded, reductions
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of, result_of

from partool.cost.training.gathers import kept_elements, longest_vector
from partool.layout.parameters import groups, parameters
from partool.plan.types import Plan
from partool.planner.forms.gathers import leaves
from partool.spec.model import ModelConfig
from partool.work.gathers import COALESCED, Controls

LARGE = """\
model: {layers: 32, hidden: 4096, heads: 32, vocab: 32000, ffn_hidden: 11008}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 8}
parallel: {tensor: 1, pipeline: 1, sequence: 1, data: {zero: 3}, micro_batch: 1, recompute: full,
           offload: {optimizer: none, activations: none, parameters: none}, compile: none}
limits: {memory_headroom: 0.05}
"""
FRUGAL = ["parallel.data.gather=sequential", "parallel.data.prefetch=0"]
shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)
units = st.lists(shapes, min_size=2, max_size=4)


def about(plan: Plan, word: str) -> list[str]:
    return [reason for reason in plan.reasons if reason.startswith(word)]


@settings(deadline=None)
@given(shapes, st.integers(1, 5))
def test_padding_is_less_than_one_row_per_rank(unit, ranks):
    for shape in unit:
        row = padded(shape, ranks) // padded((1, *shape[1:]), 1)
        assert shape[0] <= row < shape[0] + ranks
        assert row % ranks == 0


@settings(deadline=None)
@given(units, st.integers(2, 4), st.integers(1, 3))
def test_bytes_do_not_depend_on_how_messages_are_cut(found, ranks, micro_batches):
    for zero in (1, 2, 3):
        common = {"zero": zero, "ranks": ranks, "micro_batches": micro_batches, "element_bytes": 2}
        whole = gathers(found, COALESCED, **common)
        apart = gathers(found, Controls("sequential"), **common)
        assert apart.sent_bytes == whole.sent_bytes
        assert apart.calls >= whole.calls
        once = reductions(found, zero=1, ranks=ranks, micro_batches=1, element_bytes=2)
        assert reductions(found, **common) == once.times(1 if zero == 1 else micro_batches)


@settings(deadline=None)
@given(units, st.integers(2, 4), st.integers(1, 3), st.integers(0, 200))
def test_what_persists_travels_once_a_step(found, ranks, micro_batches, most):
    controls = Controls("coalesced", 1, most)
    common = {"zero": 3, "ranks": ranks, "micro_batches": micro_batches, "element_bytes": 4}
    kept = kept_bytes(found, controls, ranks=ranks, element_bytes=4)
    with_kept, without = gathers(found, controls, **common), gathers(found, COALESCED, **common)
    assert with_kept.sent_bytes <= without.sent_bytes
    if kept and with_kept.sent_bytes == kept // ranks * (ranks - 1):
        assert with_kept.calls == 1
    everything = gathers(found, replace(controls, persistent_elements=10**9), **common)
    assert everything.calls == 1


def test_kept_elements_are_those_of_the_models_parameters():
    model = ModelConfig(layers=3, hidden=30, heads=5, kv_heads=5, head_dim=6, ffn_hidden=37, vocab=257, qk_norm=True)
    sizes = [info.elements for info in parameters(model)]
    for most in (0, 6, 30, 900, 10**6):
        assert kept_elements(model, most) == sum(size for size in sizes if size <= most)
    assert longest_vector(model) == 30


def test_gathers_are_coalesced_where_there_is_room():
    layout = plan_of(LARGE).layout
    assert (layout.data.gather, layout.data.prefetch, layout.data.persistent, layout.data.leaves) == (
        "coalesced",
        1,
        0,
        (),
    )
    assert about(plan_of(LARGE), "Gather coalesced: the fewest messages")


def test_pinned_ways_are_taken_priced_and_told():
    plain = plan_of(LARGE)
    pinned = plan_of(LARGE, *FRUGAL, "parallel.data.persistent=5000")
    layout = pinned.layout
    assert (layout.data.gather, layout.data.prefetch, layout.data.persistent) == ("sequential", 0, 5000)
    assert about(pinned, "Gather sequential: the spec asks for it")
    assert about(pinned, "Prefetch 0: the spec asks for it")
    assert about(pinned, "Persistent up to 5,000 elements: the spec asks for it")
    terms, before = pinned.prediction.memory.terms_bytes, plain.prediction.memory.terms_bytes
    # At the peak a layer's backward pass runs. The pinned plan has no message that gathers another layer meanwhile.
    layer = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert before["communication"] - terms["communication"] == pytest.approx(layer, rel=0.01)
    assert plain.prediction.memory.total_bytes - pinned.prediction.memory.total_bytes > 0.8 * layer
    assert pinned.prediction.time.step_time_s > plain.prediction.time.step_time_s


@pytest.mark.parametrize("persistent", [0, 4096])
@pytest.mark.parametrize("gather", ["coalesced", "sequential"])
def test_predicted_traffic_is_what_is_counted(gather, persistent):
    """The runtime's counts equal ``gathers`` exactly (``test_zero_controls`` of the parity tests)."""
    plan = plan_of(LARGE, f"parallel.data.gather={gather}", f"parallel.data.persistent={persistent}")
    shapes = [[info.shape for info in group] for group in groups(plan.model)]
    layout = plan.layout
    counted = gathers(
        shapes,
        Controls(gather, 1, persistent),
        zero=3,
        ranks=layout.mesh.dp_shard,
        micro_batches=layout.derived.accumulation,
        element_bytes=2,
    )
    predicted = plan.prediction.time.traffic_bytes["parameter_gather"]
    assert predicted == pytest.approx(counted.sent_bytes, rel=1e-6 if persistent else 0, abs=1)


def test_looking_further_ahead_takes_memory():
    found = [plan_of(LARGE, f"parallel.data.prefetch={depth}") for depth in (0, 1, 2, 4)]
    gathered = [plan.prediction.memory.terms_bytes["gathered"] for plan in found]
    assert gathered == sorted(gathered)
    assert gathered[3] - gathered[2] == pytest.approx(2 * (gathered[2] - gathered[1]), rel=0.01)
    assert found[0].prediction.time.step_time_s >= found[1].prediction.time.step_time_s


def test_short_memory_turns_to_sequential_gathers():
    """The device has less memory than a coalesced gather needs, and more than a sequential one needs."""
    needed = plan_of(LARGE).prediction.memory
    frugal = plan_of(LARGE, *FRUGAL).prediction.memory
    # What idle streams keep counts as fragmentation, and is given back before memory runs out.
    tensors = [sum(its.terms_bytes.values()) - its.terms_bytes["fragmentation"] for its in (needed, frugal)]
    between = 1.03 * sum(tensors) / 2
    short = f"limits.memory_headroom={1 - between / (needed.capacity_bytes / 0.95)}"
    turned = plan_of(LARGE, short)
    assert (turned.layout.data.gather, turned.layout.data.prefetch) == ("sequential", 0)
    assert turned.layout.data.persistent == 4096
    assert turned.prediction.memory.verdict == "green"
    assert about(turned, "Gather sequential: the best layout that gathers layers at once")
    assert about(turned, "Prefetch 0: memory is short")
    assert result_of(LARGE, short, "parallel.data.gather=coalesced", "parallel.data.prefetch=1").plan is None


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_fields_without_meaning_stay_as_they_are(zero):
    small = LARGE.replace("layers: 32", "layers: 4").replace("zero: 3", f"zero: {zero}")
    layout = plan_of(small, *FRUGAL).layout
    assert layout.data.prefetch == 1
    assert layout.data.gather == ("sequential" if zero else "coalesced")


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (["model.layers.0.mlp.experts.0", "model.layers.0.mlp.experts.1.up", "model.layers.3.mlp.experts.0"],
         ("model.layers.*.mlp",)),
        (["model.layers.0.mlp.experts", "model.layers.0.mlp.gate"], ()),
        (["model.layers.0.mlp"], ()),
    ],
)  # fmt: skip
def test_what_calls_experts_one_by_one_is_a_leaf(names, want):
    modules = [SimpleNamespace(name=name) for name in names]
    spec = SimpleNamespace(parallel=SimpleNamespace(data=SimpleNamespace(leaves="auto")))
    problem: Any = SimpleNamespace(spec=spec, described=SimpleNamespace(structure=SimpleNamespace(modules=modules)))
    assert leaves(problem) == want


def test_leaves_are_planned_and_exclude_compiled_blocks():
    text = LARGE.replace(", compile: none", "")
    assert plan_of(text).layout.compile == "block"
    plan = plan_of(text, "parallel.data.leaves=['layers.*.ffn']")
    assert plan.layout.compile == "none"
    assert plan.layout.data.leaves == ("layers.*.ffn",)
    assert about(plan, "Leaves layers.*.ffn: the spec asks for it")


def told(text: str, *overrides: str) -> list[str]:
    """Return the findings about controls without effect."""
    return [found.message for found in result_of(text, *overrides).diagnostics if found.code == "PT460"]


def test_controls_that_the_chosen_layout_has_no_use_for_are_told():
    small = LARGE.replace("layers: 32", "layers: 2").replace("zero: 3", "zero: ZERO")
    pinned = [f"parallel.data.{value}" for value in ("prefetch=2", "persistent=100", "gather=sequential")]
    auto = plan_of(small.replace("ZERO", "auto"), *pinned).layout
    assert auto.data.zero in (1, 2)
    words = told(small.replace("ZERO", "auto"), *pinned)
    assert [word.partition(":")[0] for word in words] == ["prefetch", "persistent"]
    assert all(word.endswith(f"the plan has ZeRO-{auto.data.zero}") for word in words)
    assert told(small.replace("ZERO", "3"), *pinned) == []
    assert len(told(small.replace("ZERO", "1"), *pinned)) == 2
    alone = told(small.replace("ZERO", "auto").replace("per_node: 8", "per_node: 1"), *pinned)
    assert [word.partition(":")[0] for word in alone] == ["prefetch", "persistent", "gather"]
    assert "no ranks that share parameters" in alone[0]

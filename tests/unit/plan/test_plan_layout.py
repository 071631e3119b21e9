"""The layout of a plan: its names are the spec's, columns store it without loss, and contradictions are found."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import laid, new_layout
from planned import plan_of
from pydantic import BaseModel

from partool.cost.case import EXCHANGES, INSIDES, ORDERS, OVERLAPS, RECOMPUTE, SCHEDULES
from partool.cost.codec import decode, encode, lists_of
from partool.layout.sequence import Order
from partool.plan.as_spec import own_yaml
from partool.plan.layout import Layout, Mesh, OffloadLayout
from partool.planner import PlanResult, make_plan
from partool.spec import load_text
from partool.spec.parallel import ExpertExchange, Inside, ParallelSpec, Recompute, ScheduleFile, TensorOverlap, Tier
from partool.strategies import schedules, sequence

RESOLVED_ONLY = {"derived", "sequence.order", "pipeline.waves", "pipeline.in_flight", "pipeline.schedule"}
"""Fields whose values a spec cannot give in the same words: derived values, ``grid``, 0 for none, and a file."""


def leaves(annotation: Any) -> set[Any]:
    """Return the plain types and literal values of an annotation; resolved values exclude ``auto`` and None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return set()
    origin = get_origin(annotation)
    if origin is Literal:
        return set(get_args(annotation)) - {"auto"}
    if origin is Annotated:
        return leaves(get_args(annotation)[0])
    if origin in (Union, UnionType, list, tuple):
        return set().union(*(leaves(one) for one in get_args(annotation) if one is not Ellipsis))
    return {annotation} - {NoneType, Ellipsis}


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return annotations by dotted name."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = kind
    return found


def test_names_nesting_and_choices_are_those_of_the_spec() -> None:
    asked, resolved = fields(ParallelSpec), fields(Layout)
    assert {name for name in resolved if not name.startswith("derived.")} == asked.keys()
    for name in asked.keys() - RESOLVED_ONLY:
        choices, own = leaves(asked[name]), leaves(resolved[name])
        assert choices, name
        assert choices == own, name
        assert "auto" not in get_args(resolved[name]), name


def test_what_a_spec_cannot_say_is_derived() -> None:
    said = {name for name in fields(Layout) if name.startswith("derived.")}
    assert not {name.removeprefix("derived.") for name in said} & fields(ParallelSpec).keys()


TIERS = st.sampled_from(get_args(Tier))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of every strategy, whether they can run or not."""
    mesh = Mesh(*(draw(st.integers(1, 4)) for _ in range(5)))
    schedule = draw(st.sampled_from(SCHEDULES))
    chunks = 2 * draw(st.integers(1, 3)) if schedule == "hanayo" else draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 3), min_size=mesh.pp * chunks, max_size=mesh.pp * chunks))
    ends = [sum(counts[:at]) for at in range(len(counts) + 1)]
    policies = draw(st.lists(st.sampled_from(RECOMPUTE), min_size=ends[-1], max_size=ends[-1]))
    method = draw(st.sampled_from(tuple(sequence.METHODS)))
    optimizer = draw(TIERS)
    inner = draw(st.sampled_from([n for n in (1, 2, 3, 4) if mesh.tp % n == 0]))
    expert, cuts, exchange = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.sampled_from(EXCHANGES))
    capacity = draw(st.floats(0.1, 1.0)) * expert * cuts if exchange == "padded" else None
    parts: dict[str, Any] = {
        "sequence_method": method, "sequence_order": draw(st.sampled_from(ORDERS)),
        "sequence_inside": draw(st.sampled_from(INSIDES)), "tensor_overlap": draw(st.sampled_from(OVERLAPS)),
        "tensor_inner": inner, "sequence_norms": draw(st.booleans()), "tensor_chunks": draw(st.integers(1, 4)),
        "gather": draw(st.sampled_from(("coalesced", "sequential"))), "prefetch": draw(st.integers(0, 4)),
        "persistent": draw(st.integers(0, 10**9)), "leaves": tuple(draw(st.lists(st.sampled_from(("a.*", "b"))))),
        "mlp_tile_tokens": draw(st.integers(0, 9)), "loss_tile_tokens": draw(st.integers(0, 9)),
        "offload_optimizer": optimizer, "offload_parameters": draw(TIERS),
        "offload_activations": draw(st.sampled_from(("none", "cpu"))), "expert": expert,
        "expert_tensor": cuts, "expert_exchange": exchange, "expert_rank_capacity": capacity,
        "in_flight": draw(st.integers(0, 9)), "schedule": schedule, "chunks": chunks, "mesh": mesh,
        "gpu_fraction": 1.0 if optimizer == "none" else draw(st.floats(0.0, 0.99)),
        "speculate": draw(st.sampled_from((False, True, "undo"))), "undo_gib": draw(st.floats(0.0, 9.0)),
        "gradients": draw(st.sampled_from(("bf16", "fp32"))), "moments": draw(st.sampled_from(("bf16", "fp32"))),
        "bucket_mib": draw(st.floats(0.1, 99.0)), "threads": draw(st.integers(1, 9)),
        "dir": draw(st.sampled_from((None, "/state"))), "buffers": draw(st.integers(3, 9)),
        "pinned_gib": draw(st.sampled_from((None, 1.5))),
        "fused": tuple(draw(st.sets(st.sampled_from(("norm", "loss"))))),
        "schedule_text": "lists" if schedule == "file" else "", "schedule_hash": draw(st.sampled_from(("", "0" * 64))),
    }  # fmt: skip
    return new_layout(
        zero=draw(st.integers(0, 3)), micro_batch=draw(st.integers(1, 9)), accumulation=draw(st.integers(1, 9)),
        recompute=tuple(policies), compile=draw(st.sampled_from(("none", "block"))),
        stages=tuple(pairwise(ends)), **parts,
    )  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layouts())
def test_columns_hold_a_layout_without_loss(layout: Layout) -> None:
    assert decode(encode(layout), lists_of(layout)) == layout
    assert Layout.model_validate_json(layout.model_dump_json()) == layout
    assert encode(layout).world == layout.mesh.world_size


def plain(**more: Any) -> Layout:
    return new_layout(
        zero=0, micro_batch=1, accumulation=2, recompute=("none",) * 4, compile="none", stages=((0, 2), (2, 4)),
        **{"mesh": Mesh(pp=2)} | more,
    )  # fmt: skip


CONTRADICTIONS = {
    "tensor.shape": ({"tensor.shape": (3, 1)}, "layout.tensor.shape makes 3 ranks"),
    "groups": ({"sequence.ulysses": 3}, "layout.sequence.ulysses makes groups of 3 ranks among 1"),
    "teams": ({"sequence.degree": 2, "sequence.teams": 2}, "layout.sequence.teams makes groups of 4 ranks among 2"),
    "stages": ({"pipeline.layers": (4,)}, "layout.pipeline.layers names 1 stages"),
    "waves": ({"pipeline.waves": 1}, "layout.pipeline.waves is 1"),
    "no waves": ({"pipeline.schedule": "hanayo", "pipeline.chunks": 2, "pipeline.layers": (1, 1, 1, 1)}, "waves is 0"),
    "recompute": ({"recompute": ("none",)}, "layout.recompute names 1 layers"),
    "schedule": ({"pipeline.schedule": "unheard"}, "layout.pipeline.schedule is unheard"),
    "a share of nothing": ({"offload.gpu_fraction": 0.0}, "layout.offload.gpu_fraction is 0 with optimizer: none"),
    "all of it stays": ({"offload.optimizer": "cpu"}, "layout.offload.gpu_fraction is 1 with optimizer: cpu"),
    "no folder": (
        {"offload.optimizer": "nvme", "offload.gpu_fraction": 0.0},
        "layout.offload names no dir",
    ),
}


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_is_said_in_two_ways_must_agree(changes: dict[str, Any], words: str) -> None:
    assert not plain().contradiction
    assert words in plain().changed(changes).contradiction


def test_a_field_that_is_none_cannot_be_changed() -> None:
    for name in ("zero", "mesh", "contradiction", "data.stage", "offload.host", "micro_batch.x"):
        with pytest.raises(AttributeError):
            plain().changed({name: 1})


def test_sizes_in_bytes_follow_from_those_of_the_spec() -> None:
    offload = OffloadLayout(bucket_mib=0.3, undo_gib=1.7, pinned_gib=2.5)
    assert (offload.bucket_bytes, offload.undo_bytes) == (int(0.3 * 2**20), int(1.7 * 2**30))
    assert offload.pinned_limit_bytes == 5 * 2**29
    assert OffloadLayout().pinned_limit_bytes == 0
    assert not OffloadLayout().active
    assert OffloadLayout(activations="cpu").active


def test_records_agree_with_what_layouts_name() -> None:
    assert set(get_args(Order)) == set(ORDERS)
    assert set(get_args(Inside)) == set(INSIDES)
    assert set(get_args(TensorOverlap)) == set(OVERLAPS)
    assert get_args(ExpertExchange) == EXCHANGES
    assert get_args(Recompute) == RECOMPUTE, "columns hold places in this order, mildest first"
    assert set(SCHEDULES) == {*schedules.SCHEDULES, "file"}
    assert ScheduleFile.model_fields.keys() == {"file"}
    assert laid(plain(), schedule="hanayo", chunks=2).pipeline.waves == 1


BASE = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\ndata: python-stdlib\n"
GPUS = "hardware: {accelerator: h100-sxm, per_node: 2}\n"
SPECS = {
    "words about an update that does not leave": (GPUS, "{offload: {speculate: undo, undo_gib: 1, threads: 4}}"),
    "types of what stays": (GPUS, "{offload: {optimizer: auto, moments: bf16, gradients: fp32, dir: /tmp}}"),
    "gathers of ranks that share sequences": (
        "hardware: {accelerator: cpu, per_node: 2}\n",
        "{sequence: {method: ring, degree: 2}, data: {zero: 3, prefetch: 3, gather: sequential, persistent: 1000}}",
    ),
    "nearly all of it stays": (GPUS, "{offload: {optimizer: cpu, gpu_fraction: 0.9999999}}"),
    "a part stays": (GPUS, "{offload: {optimizer: cpu, gpu_fraction: 0.3, threads: 2}}"),
}


@pytest.mark.parametrize(("machines", "parallel"), SPECS.values(), ids=SPECS)
def test_what_is_printed_leaves_the_layout_and_no_finding(machines: str, parallel: str, tmp_path: Path) -> None:
    def planned(section: str) -> PlanResult:
        spec = load_text(BASE + machines + section).spec
        assert spec is not None
        return make_plan(spec, base_dir=tmp_path, default_name="pasted")

    first = planned(f"parallel: {parallel}\n")
    assert first.plan is not None
    again = planned(own_yaml(first.plan))
    assert again.plan is not None
    assert again.plan.layout == first.plan.layout
    assert again.plan.prediction.time.step_time_s == first.plan.prediction.time.step_time_s
    assert not {one.code for one in again.diagnostics} - {one.code for one in first.diagnostics}
    assert not first.plan.contradiction
    for other in (one for one in first.plan.alternatives if one.devices == first.plan.layout.mesh.world_size):
        assert planned(other.change).plan is not None


@pytest.mark.parametrize("change", [{"micro_batch": 3}, {"derived.accumulation": 5}])
def test_a_batch_that_is_not_the_layouts_is_a_contradiction(change: dict[str, int]) -> None:
    plan = plan_of(BASE + GPUS)
    assert not plan.contradiction
    edited = plan.model_copy(update={"layout": plan.layout.changed(change)})
    assert f"training.global_batch is {plan.training.global_batch}" in edited.contradiction

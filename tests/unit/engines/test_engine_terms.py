"""Plans written for other training systems are read back as the same plans, and what a system cannot do is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from often import often
from planned import checked, plan_of, result_of

from partool.cost.evidence import pair_error
from partool.engines import Imported, Wanted, read_files
from partool.engines.improve import advice
from partool.engines.write import WRITABLE, terms_of
from partool.plan.as_spec import as_spec
from partool.plan.types import Plan, Score
from partool.render.program import program
from partool.spec.experts import ExpertShape, Moe
from partool.strategies.engines import ENGINES

DENSE = """
layers: 24
hidden: 1024
ffn_hidden: 2816
heads: 16
kv_heads: 4
vocab: 32000
max_position: 4096
"""
PYRAMID = Moe(experts=8, top_k=2, ffn_hidden=704, layers={"12-23": ExpertShape(experts=16)})
EXPERTS = DENSE + "moe: {experts: 8, top_k: 2, ffn_hidden: 704}\n"


def spec_of(engine: str, model: str = DENSE, **parallel: Any) -> str:
    """Return the text of a spec on 16 devices."""
    body = "".join(f"  {line}\n" for line in model.strip().splitlines())
    lines = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in parallel.items())
    return (
        f"spec: 1\nengine: {engine}\nmodel:\n{body}hardware: {{accelerator: h100-sxm, nodes: 2, per_node: 8}}\n"
        "training: {sequence_length: 4096, global_batch: 192, precision: bf16, steps: 30}\n"
        "data: {source: python-stdlib}\n" + (f"parallel:\n{lines}" if lines else "")
    )


@cache
def planned(text: str) -> Plan:
    """Return the plan of a spec, made once."""
    return plan_of(text)


def back(plan: Plan) -> Imported:
    """Write a plan and read what was written, with the arguments for what files cannot say."""
    files = program(plan).files
    names = {"deepspeed": ["ds_config.json"], "torchtitan": ["job.toml"], "accelerate": ["accelerate.yaml", "train.sh"]}
    devices, told, model = plan.devices, {}, None
    if plan.engine == "deepspeed":
        told = {"training.sequence_length": plan.training.sequence_length, "training.steps": plan.training.steps}
        told |= terms_of(plan).untold
    if plan.engine in ("deepspeed", "accelerate"):
        model = "llama3.2-1b"
    wanted = Wanted(devices.accelerator, devices.nodes, devices.per_node, model, told, {"SCRIPT": "mine.py"})
    written = [(Path(name), files[name]) for name in names.get(plan.engine, ["train.sh"])]
    if plan.engine == "accelerate":
        written[1] = (written[1][0], "SCRIPT=mine.py; " + written[1][1])
    return read_files(written, plan.engine, wanted)  # type: ignore[arg-type]


def leaves(section: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested sections by path."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= leaves(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


FOLLOWS = {
    "data.shard", "data.gather", "data.prefetch", "data.persistent", "tensor.chunks", "sequence.order",
    "pipeline.layers", "offload.gpu_fraction", "offload.dir", "expert_exchange",
}  # fmt: skip
"""Fields that have one value in every plan for the engines, or that follow from the others unless they are read."""


def same(plan: Plan) -> None:
    """Check that what is read back is the plan's layout."""
    found = back(plan)
    assert [each for each in found.findings if each.severity == "error"] == []
    assert found.understood == 1.0, [fate for fate in found.fates if fate.kind == "not understood"]
    read_back = leaves(found.spec["parallel"])
    wanted = leaves(as_spec(plan.layout, plan.asked))
    for path in wanted.keys() | read_back.keys():
        either = path in read_back and path in wanted
        if either or not (path in FOLLOWS or wanted.get(path) == 1):
            assert read_back.get(path) == wanted.get(path), path
    assert found.spec["training"]["global_batch"] == plan.training.global_batch
    assert found.spec["training"]["precision"] == plan.training.precision


MESHES = [(tensor, stages, context) for tensor in (1, 2, 4) for stages in (1, 2, 3, 4) for context in (1, 2)]


@st.composite
def megatron_layouts(draw: st.DrawFn) -> tuple[bool, dict[str, Any]]:
    """Return whether the model has experts, and changes of a layout that Megatron-LM can do."""
    tensor, stages, context = draw(st.sampled_from(MESHES))
    chunks = draw(st.sampled_from((1, 2, 4))) if stages > 1 else 1
    while 24 % (stages * chunks):
        chunks //= 2
    zero = draw(st.sampled_from((0, 1) if stages > 1 else (0, 1, 2, 3)))
    experts = draw(st.booleans())
    fraction = draw(st.sampled_from((0.0, 0.25, 1.0))) if zero else 1.0
    changes: dict[str, Any] = {
        "tensor.degree": tensor,
        "tensor.shape": (tensor, 1),
        "tensor.sequence_norms": tensor > 1 and (experts or draw(st.booleans())),
        "pipeline.stages": stages,
        "pipeline.chunks": chunks,
        "pipeline.schedule": "interleaved" if chunks > 1 else "1f1b",
        "pipeline.layers": (24 // (stages * chunks),) * (stages * chunks),
        "sequence.degree": context,
        "data.zero": zero,
        "data.shard": 2 if zero else 1,
        "micro_batch": draw(st.sampled_from((1, 2, 3))),
        "offload.optimizer": "none" if fraction == 1.0 else "cpu",
        "offload.gpu_fraction": fraction,
    }
    if context > 1:
        method = draw(st.sampled_from(("ring", "ulysses", "all_gather")))
        order = "contiguous" if method == "ulysses" else "zigzag"
        changes |= {"sequence.method": method, "sequence.order": order}
    if experts:
        changes |= {"expert": draw(st.sampled_from((2, 4))), "expert_tensor": draw(st.sampled_from((1, 2)))}
    first = draw(st.integers(0, 24 // stages))
    size = 24 // stages
    some = tuple("full" if layer % size < first else "none" for layer in range(24))
    alike = draw(st.sampled_from(("none", "attention", "full")))
    changes["recompute"] = some if chunks == 1 and draw(st.booleans()) else (alike,) * 24
    return experts, changes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(megatron_layouts())
def test_every_layout_of_megatron_is_read_back(drawn: tuple[bool, dict[str, Any]]) -> None:
    experts, changes = drawn
    plan = planned(spec_of("megatron", EXPERTS if experts else DENSE))
    same(plan.model_copy(update={"layout": plan.layout.changed(changes)}))


@st.composite
def deepspeed_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Return changes of a layout that DeepSpeed can do."""
    zero = draw(st.integers(0, 3))
    tensor, context = draw(st.sampled_from(((1, 1), (2, 1), (1, 2), (4, 1)) if zero < 3 else ((1, 1), (1, 2), (1, 4))))
    place = draw(st.sampled_from(("none", "cpu", "nvme") if zero == 3 else ("none", "cpu") if zero else ("none",)))
    kept = draw(st.sampled_from((0.0, 0.25))) if zero == 3 and place != "none" else 0.0
    parameters = draw(st.sampled_from(("none", place))) if zero == 3 and not kept else "none"
    return {
        "tensor.degree": tensor,
        "tensor.shape": (tensor, 1),
        "sequence.degree": context,
        "data.zero": zero,
        "data.persistent": draw(st.sampled_from((0, 100_000))) if zero == 3 else 0,
        "micro_batch": draw(st.sampled_from((1, 2, 3))),
        "offload.optimizer": place,
        "offload.gpu_fraction": 1.0 if place == "none" else kept,
        "offload.parameters": parameters,
        "offload.dir": "/nvme" if place == "nvme" else None,
        "recompute": (draw(st.sampled_from(("none", "full"))),) * 24,
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(deepspeed_layouts())
def test_every_layout_of_deepspeed_is_read_back(changes: dict[str, Any]) -> None:
    plan = planned(spec_of("deepspeed"))
    layout = plan.layout.changed(changes)
    ranks = layout.tensor.degree * layout.sequence.degree
    derived = layout.derived.model_copy(update={"accumulation": 192 // layout.micro_batch // (16 // ranks)})
    same(plan.model_copy(update={"layout": layout.model_copy(update={"derived": derived})}))


TITAN = "preset: deepseek-v2-lite\n"


@st.composite
def torchtitan_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Return changes of a layout of 27 layers on 16 devices that torchtitan can do."""
    stages, chunks = draw(st.sampled_from(((1, 1), (1, 1), (3, 1), (3, 3), (9, 1), (3, 9))))
    context = draw(st.sampled_from((1, 2)))
    zero = draw(st.sampled_from((2, 3) if context > 1 or stages > 1 else (0, 2, 3)))
    shard, replicas = draw(st.sampled_from(((8, 1), (4, 2)))) if zero else (1, 8)
    tensor = draw(st.sampled_from((1, 2, 4)))
    place = draw(st.sampled_from(("none", "cpu"))) if zero == 3 else "none"
    alike = (draw(st.sampled_from(("none", "selective", "full"))),) * 27
    third = tuple("none" if (layer + 1) % 3 else "full" for layer in range(27))
    method, order = draw(st.sampled_from((("ring", "zigzag"), ("all_gather", "contiguous"))))
    return {
        "pipeline.stages": stages,
        "pipeline.chunks": chunks,
        "pipeline.schedule": "interleaved" if chunks > 1 else draw(st.sampled_from(("1f1b", "gpipe"))),
        "pipeline.layers": (27 // (stages * chunks),) * (stages * chunks),
        "sequence.degree": context,
        "sequence.method": method if context > 1 else "ulysses",
        "sequence.order": order if context > 1 else "contiguous",
        "tensor.degree": tensor,
        "tensor.shape": (tensor, 1),
        "tensor.sequence_norms": tensor > 1,
        "data.zero": zero,
        "data.shard": shard,
        "derived.replicas": replicas,
        "expert": draw(st.sampled_from((1, 2, 4))),
        "micro_batch": draw(st.sampled_from((1, 2, 3))),
        "offload.optimizer": place,
        "offload.parameters": place,
        "offload.gpu_fraction": 1.0 if place == "none" else 0.0,
        "recompute": draw(st.sampled_from((alike, third))),
        "compile": draw(st.sampled_from(("none", "block"))),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(torchtitan_layouts())
def test_every_layout_of_torchtitan_is_read_back(changes: dict[str, Any]) -> None:
    same(on_its_ranks(planned(spec_of("torchtitan", TITAN)), changes))


@st.composite
def accelerate_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Return changes of a layout that accelerate can do."""
    context = draw(st.sampled_from((1, 2)))
    tensor = draw(st.sampled_from((1, 2))) if context == 1 else 1
    zero = draw(st.sampled_from((0, 2, 3) if tensor * context == 1 else (2, 3)))
    shard, replicas = draw(st.sampled_from(((8, 1), (4, 2)))) if zero else (1, 8)
    place = draw(st.sampled_from(("none", "cpu"))) if zero == 3 else "none"
    return {
        "sequence.degree": context,
        "sequence.method": draw(st.sampled_from(("ring", "all_gather"))) if context > 1 else "ulysses",
        "sequence.order": "zigzag" if context > 1 else "contiguous",
        "tensor.degree": tensor,
        "tensor.shape": (tensor, 1),
        "data.zero": zero,
        "data.shard": shard,
        "derived.replicas": replicas,
        "micro_batch": draw(st.sampled_from((1, 2, 3))),
        "offload.optimizer": place,
        "offload.parameters": place,
        "offload.gpu_fraction": 1.0 if place == "none" else 0.0,
        "recompute": (draw(st.sampled_from(("none", "full"))),) * 24,
        "compile": draw(st.sampled_from(("none", "block"))),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(accelerate_layouts())
def test_every_layout_of_accelerate_is_read_back(changes: dict[str, Any]) -> None:
    same(on_its_ranks(planned(spec_of("accelerate")), changes))


def on_its_ranks(plan: Plan, changes: dict[str, Any]) -> Plan:
    """Return a plan with another layout, on as many devices as its degrees make, and with a batch that they divide."""
    layout = plan.layout.changed(changes)
    mesh = layout.mesh
    batch = 12 * layout.micro_batch * mesh.dp
    layout = layout.changed({"derived.accumulation": 12})
    devices = plan.devices.model_copy(update={"nodes": mesh.world_size // 8, "per_node": 8})
    training = plan.training.model_copy(update={"global_batch": batch})
    return plan.model_copy(update={"layout": layout, "devices": devices, "training": training})


@pytest.mark.parametrize("engine", WRITABLE)
def test_a_plan_of_an_engine_is_one_that_it_can_do(engine: str) -> None:
    """The same spec has a plan that the engine's files can say, and it is planned again from them."""
    plan = planned(spec_of(engine, TITAN if engine == "torchtitan" else DENSE))
    assert terms_of(plan).findings == []
    assert plan.layout.compile == ENGINES[engine].settled.get("compile", "block")
    again = plan_of(_as_text(back(plan)), *_model(plan))
    assert again.layout == plan.layout
    assert again.prediction.time.step_time_s == plan.prediction.time.step_time_s


PINNED: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": {"degree": 2}},
    "sequence": {"sequence": {"degree": 2}},
    "replicas beside tensor": {"tensor": {"degree": 4}, "pipeline": {"stages": 1}, "micro_batch": 1},
    "host": {"offload": {"optimizer": "cpu"}},
}


@pytest.mark.parametrize("pinned", often(PINNED, ["tensor"]))
@pytest.mark.parametrize("engine", WRITABLE)
def test_what_a_search_finds_for_an_engine_can_be_written(engine: str, pinned: str) -> None:
    text = spec_of(engine, TITAN if engine == "torchtitan" else DENSE, **PINNED[pinned])
    made = result_of(text)
    if made.plan is None:  # the engine cannot do what is pinned, and says so at the field
        assert {each.code for each in made.diagnostics if each.severity == "error"} == {"PT828"}
    else:
        assert terms_of(made.plan).findings == []


def test_experts_on_tensor_ranks_can_be_written_for_megatron() -> None:
    plan = planned(spec_of("megatron", EXPERTS, tensor={"degree": 2}))
    assert plan.layout.tensor.sequence_norms
    assert terms_of(plan).findings == []


def _as_text(found: Imported) -> str:
    from partool.engines.imported import spec_text

    return spec_text(found, Path("file"))


def _model(plan: Plan) -> list[str]:
    """Return the model that a configuration of DeepSpeed does not describe."""
    given = plan.spec["model"]
    return (
        []
        if plan.engine in ("megatron", "torchtitan")
        else ["model.preset=null", *(f"model.{k}={v}" for k, v in given.items())]
    )


REFUSED = [
    ("megatron", {"recompute": "selective"}, "recompute"),
    ("megatron", {"offload": {"activations": "cpu"}}, "offload"),
    ("megatron", {"pipeline": {"stages": 2, "schedule": "hanayo"}}, "schedule"),
    ("megatron", {"pipeline": {"stages": 2}, "data": {"zero": 3}}, "zero"),
    ("megatron", {"sequence": {"method": "usp", "degree": 4}}, "method"),
    ("megatron", {"tiles": {"mlp": 1024}}, "mlp"),
    ("megatron", {"compile": "none"}, "compile"),
    ("megatron", {"data": {"zero": 0}, "offload": {"optimizer": "cpu"}}, "zero"),
    ("deepspeed", {"pipeline": {"stages": 2}}, "schedule"),
    ("deepspeed", {"data": {"zero": 3}, "tensor": {"degree": 2}}, "zero"),
    ("deepspeed", {"recompute": "attention"}, "recompute"),
    ("deepspeed", {"sequence": {"method": "ring", "degree": 2}}, "method"),
    ("deepspeed", {"data": {"gather": "sequential"}}, "gather"),
    ("deepspeed", {"data": {"zero": 3, "prefetch": 2}}, "prefetch"),
    ("megatron", {"data": {"zero": 3, "persistent": 1000}}, "persistent"),
    ("torchtitan", {"data": {"zero": 1}}, "zero"),
    ("torchtitan", {"offload": {"optimizer": "cpu", "parameters": "none"}, "data": {"zero": 3}}, "offload"),
    ("torchtitan", {"sequence": {"method": "ulysses", "degree": 2}}, "method"),
    ("accelerate", {"pipeline": {"stages": 2}}, "schedule"),
    ("accelerate", {"recompute": "selective"}, "recompute"),
]


@pytest.mark.parametrize(("engine", "parallel", "field"), REFUSED)
def test_what_an_engine_lacks_is_an_error_at_its_field(engine: str, parallel: dict[str, Any], field: str) -> None:
    found = [each for each in checked(spec_of(engine, **parallel)) if each.severity == "error"]
    assert [each.code for each in found] == ["PT828"], found
    assert field in found[0].path
    assert found[0].help
    ours = [each for each in checked(spec_of("partool", **parallel)) if each.code == "PT828"]
    assert ours == []


def test_what_has_no_words_is_refused_before_anything_is_written() -> None:
    """Layouts that the search would not choose: somebody has edited a plan."""
    plan = planned(spec_of("megatron"))
    for changes, says in (
        ({"recompute": ("none",) * 12 + ("full",) * 12}, "first layers"),
        ({"recompute": ("selective",) * 24}, "recompute selective"),
        ({"pipeline.stages": 2, "pipeline.layers": (11, 13)}, "different numbers"),
        ({"tensor.degree": 3, "tensor.shape": (3, 1)}, "32000 rows"),
    ):
        found = terms_of(plan.model_copy(update={"layout": plan.layout.changed(changes)})).findings
        assert any(says in each.message for each in found), found
        assert all(each.code == "PT828" and each.help for each in found)
    changes_of_model: list[tuple[dict[str, Any], str]] = [
        ({"activation": "geglu"}, "geglu"),
        ({"qkv_bias": False, "out_bias": True}, "biases"),
        ({"moe": PYRAMID}, "experts that differ by layer"),
    ]
    for model, says in changes_of_model:
        changed = plan.model_copy(update={"model": plan.model.model_copy(update=model)})
        assert any(says in each.message for each in terms_of(changed).findings)


def test_torchtitan_has_no_model_whose_experts_differ_by_layer() -> None:
    plan = planned(spec_of("torchtitan", TITAN))
    changes: dict[str, Any] = {
        "spec": plan.spec | {"model": {}},
        "model": plan.model.model_copy(update={"moe": PYRAMID}),
    }
    (finding,) = terms_of(plan.model_copy(update=changes)).findings
    assert (finding.code, "registry has no such model" in finding.message) == ("PT828", True)


SLOW = {"tensor": {"degree": 8, "sequence_norms": False}, "recompute": "full", "micro_batch": 1, "data": {"zero": 1}}


def test_improvements_are_in_the_words_of_the_engine() -> None:
    before, after = planned(spec_of("megatron", **SLOW)), planned(spec_of("megatron"))
    found = advice(before, after)
    names = {change.name: (change.before, change.after) for change in found.changes}
    assert names["recompute-granularity"] == ("full", None)
    assert names["tensor-model-parallel-size"] == (8, after.layout.tensor.degree)
    assert found.worth_it
    assert found.faster == pytest.approx(before.prediction.time.step_time_s / after.prediction.time.step_time_s - 1.0)
    assert advice(after, after).changes == ()
    assert not advice(after, after).worth_it
    assert not advice(after, before).worth_it
    ours = advice(planned(spec_of("partool", **SLOW)), planned(spec_of("partool")))
    assert any(change.name == "tensor.degree" for change in ours.changes)


def test_small_gains_and_new_risks_are_no_advice() -> None:
    """The same layout at a slightly shorter time is not worth a change, nor is a mechanism that may err by its gain."""
    before = planned(spec_of("megatron", **SLOW))
    layout = before.layout.model_copy(update={"micro_batch": 2})
    time = before.prediction.time.model_copy(update={"step_time_s": before.prediction.time.step_time_s / 1.02})
    prediction = before.prediction.model_copy(update={"time": time})
    near = advice(before, before.model_copy(update={"layout": layout, "prediction": prediction}))
    assert near.changes
    assert near.faster == pytest.approx(0.02)
    assert not near.worth_it
    for factor, pipeline, worth_it in ((1.12, 1, True), (1.12, 2, False), (1.4, 2, True)):
        # A pipeline that the run does not have is charged what its predictions err by; other settings are not.
        faster = time.model_copy(update={"step_time_s": before.prediction.time.step_time_s / factor})
        risk = {"pipelines": pair_error("pipeline")} if pipeline > 1 else {"tensor parallelism": pair_error("tensor")}
        score = Score(score_s=faster.step_time_s * 1.15, shares=risk)
        other = before.model_copy(
            update={
                "layout": layout,
                "prediction": before.prediction.model_copy(update={"time": faster, "score": score}),
            }
        )
        assert advice(before, other).worth_it == worth_it, (factor, pipeline)

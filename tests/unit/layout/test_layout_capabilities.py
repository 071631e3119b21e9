"""Capabilities of the runtime: each entry names an existing test, and nothing without an entry can run."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from layouts import new_layout

from partool.cost.case import Layouts
from partool.layout.capabilities import CAPABILITIES, GAPS
from partool.plan.layout import Layout, Mesh
from partool.planner.forms.runnable import Task, able, aspects, gaps, of_columns
from partool.spec.adapter import LowRank
from partool.spec.experts import Moe
from partool.spec.hardware import Devices
from partool.spec.model import Activation, AttentionKind, Mla, ModelConfig, MultiToken, Norm, Position, RopeScaling
from partool.spec.parallel import Compile, Recompute, ZeroStage
from partool.spec.training import Precision
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS

ROOT = Path(__file__).parents[3]
MODEL = ModelConfig(layers=2, hidden=8, ffn_hidden=8, heads=2, kv_heads=2, head_dim=4, vocab=9)
DEVICES = Devices(
    accelerator="cpu", backend="cpu", nodes=1, per_node=1, memory_bytes=2**30, peak_flops=None, achievable_flops=1e9,
    memory_bytes_per_s=1e9, link_bytes_per_s=1e9, fabric_bytes_per_s=1e9,
)  # fmt: skip
Asked = tuple[Task, Layout]
KNOWN = {capability.aspect for capability in CAPABILITIES}


def needs(
    *, precision: Any = "fp32", frozen: bool = False, hf: bool = False, model: ModelConfig = MODEL, **fields: Any
) -> Asked:
    """Return a task and a layout of one device; ``fields`` change the machines and the layout."""
    machines = {name: fields.pop(name) for name in ("backend", "nodes", "architecture") if name in fields}
    values = {"zero": 0, "micro_batch": 1, "accumulation": 1, "recompute": ("none",) * 2, "compile": "none"} | fields
    layout = new_layout(**{"stages": ((0, 2),)} | values)
    return Task(model, DEVICES.model_copy(update=machines), precision, frozen, hf), layout


def of(**changes: Any) -> Asked:
    return needs(model=MODEL.model_copy(update=changes))


TWO, PIPED, SHARED, CUT = Mesh(dp_replicate=2), Mesh(pp=2), Mesh(cp=2), Mesh(tp=2)
HALVES = ((0, 1), (1, 2))
PLAIN = needs()
MIXED = Moe(experts=4, top_k=2, ffn_hidden=8)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.aspect)
def test_parity_test_exists(capability: Any) -> None:
    file, _, function = capability.parity_test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def of_adapters(piped: dict[str, Any]) -> list[Asked]:
    """Return tasks and layouts of models with an adapter."""
    model = MODEL.model_copy(update={"adapter": LowRank()})
    dropping = MODEL.model_copy(update={"adapter": LowRank(dropout=0.1)})
    others = [
        needs(model=model, precision="fp8"), needs(model=model, schedule="weipipe", **piped),
        needs(model=model, mesh=CUT, tensor_inner=2), needs(model=model, expert=2, expert_tensor=2),
    ]  # fmt: skip
    of_transformers = [
        needs(model=dropping, mlp_tile_tokens=4), needs(model=dropping, mesh=CUT),
        needs(model=model, mesh=Mesh(cp=2), sequence_method="compiled"),
    ]  # fmt: skip
    others += [(replace(task, hf=True), layout) for task, layout in of_transformers]
    others.append(needs(model=dropping, mesh=Mesh(cp=2), sequence_method="dsp"))
    return [*others, *((of_optimizer(model, name)) for name in ("adamw", "muon", "zero_one_adam"))]


def of_preferences(piped: dict[str, Any]) -> list[Asked]:
    """Return tasks and layouts whose objective compares pairs of answers."""
    layouts = [needs(), needs(schedule="weipipe", **piped), needs(mesh=CUT, tensor_inner=2)]
    return [(replace(task, prefers=True), layout) for task, layout in layouts]


def of_prompts(piped: dict[str, Any]) -> list[Asked]:
    """Return tasks and layouts whose validations continue prompts."""
    layouts = [needs(), needs(schedule="weipipe", **piped), needs(mesh=CUT, tensor_inner=2)]
    return [(replace(task, continues=True), layout) for task, layout in layouts]


def of_averages() -> list[Asked]:
    """Return tasks and layouts with a moving average of the weights."""
    layouts = [needs(), needs(offload_optimizer="cpu", gpu_fraction=0.5), needs(offload_parameters="cpu")]
    task, layout = of_optimizer(MODEL, "zero_one_adam")
    return [(replace(task, averages=True), layout) for task, layout in [*layouts, (task, layout)]]


def of_predictions(piped: dict[str, Any]) -> list[Asked]:
    """Return tasks and layouts of models that predict further tokens."""
    model = MODEL.model_copy(update={"multi_token": MultiToken()})
    task, layout = needs(model=model)
    return [
        (task, layout), of_optimizer(model, "muon"), needs(model=model, mesh=SHARED, sequence_method="ulysses"),
        needs(model=model, **piped), needs(model=model, mesh=CUT, tensor_inner=2),
        needs(model=model, mesh=SHARED, sequence_method="dsp"),
        *(needs(model=model, **fields) for fields in ({"offload_parameters": "cpu"}, {"offload_activations": "cpu"})),
        needs(model=model, offload_optimizer="cpu", gpu_fraction=0.5), needs(model=model, precision="fp8"),
        needs(model=model.model_copy(update={"adapter": LowRank()})), (replace(task, prefers=True), layout),
        of_optimizer(model, "zero_one_adam"),
    ]  # fmt: skip


def of_optimizer(model: ModelConfig, name: str) -> Asked:
    task, layout = needs(model=model)
    return replace(task, optimizer=name), layout


def every_kind() -> list[Asked]:
    """Return tasks and layouts that together have every aspect a spec can ask for."""
    backends = get_args(Devices.model_fields["backend"].annotation)
    piped, every_way = {"mesh": PIPED, "stages": HALVES}, {"gather": "sequential", "prefetch": 2, "persistent": 4}
    return [
        *(needs(backend=value) for value in backends),
        *(needs(zero=value) for value in get_args(ZeroStage)),
        *(needs(precision=value) for value in get_args(Precision)),
        *(needs(schedule=value, **piped) for value in [*SCHEDULES, "file"]),
        *(needs(compile=value) for value in get_args(Compile)),
        *(needs(recompute=(value,) * 2) for value in get_args(Recompute)),
        *(of(norm=value) for value in get_args(Norm)),
        *(of(activation=value) for value in get_args(Activation)),
        *(of(position=value) for value in get_args(Position)),
        *(of(layer_types=(value,) * 2, window=4) for value in get_args(AttentionKind)),
        needs(nodes=2), needs(mesh=Mesh(tp=2, pp=2), stages=HALVES), needs(expert=2), needs(expert=2, expert_tensor=2),
        needs(expert=2, expert_exchange="node_first"), needs(expert=2, expert_exchange="padded"),
        *(needs(mesh=SHARED, sequence_method=value) for value in METHODS),
        needs(mesh=CUT, tensor_inner=2), needs(mesh=CUT, sequence_norms=True),
        needs(mesh=CUT, tensor_overlap="symmetric"),
        needs(precision="fp8", mesh=CUT, tensor_inner=2), needs(precision="fp8", hf=True, mesh=CUT),
        needs(precision="fp8", schedule="weipipe", **piped), needs(precision="fp8", architecture="sm_89"),
        needs(offload_optimizer="nvme"), needs(offload_parameters="nvme"), needs(offload_activations="cpu"),
        needs(zero=3, leaves=("a",), **every_way), needs(hf=True), needs(hf=True, mesh=SHARED),
        needs(mlp_tile_tokens=4), needs(loss_tile_tokens=4),
        needs(mesh=Mesh(cp=2, tp=2), sequence_method="compiled"),
        needs(zero=3, **piped), needs(zero=3, mesh=CUT), needs(mesh=Mesh(cp=2, tp=2)),
        needs(mesh=Mesh(dp_replicate=2, tp=2)),
        needs(zero=3, mesh=TWO), needs(accumulation=2), needs(frozen=True),
        of(tied_embeddings=True), of(kv_heads=1), of(qk_norm=True), of(qkv_bias=True),
        of(rope_scaling=RopeScaling(factor=8.0, original_max_position=16)),
        of(moe=MIXED), of(moe=MIXED.model_copy(update={"bias": True})), of(sinks=True),
        needs(model=MODEL.model_copy(update={"moe": MIXED}), precision="fp8"),
        needs(model=MODEL.model_copy(update={"moe": MIXED}), mesh=SHARED, sequence_method="dsp"),
        needs(model=MODEL.model_copy(update={"moe": MIXED}), schedule="weipipe", **piped),
        of(mla=Mla(kv_rank=4, nope_head_dim=2, rope_head_dim=2, v_head_dim=4)),
        *((replace(PLAIN[0], taught=True), layout) for layout in (PLAIN[1], needs(mesh=CUT, tensor_inner=2)[1])),
        *of_adapters(piped), *of_preferences(piped), *of_prompts(piped), *of_averages(), *of_predictions(piped),
    ]  # fmt: skip


def test_every_aspect_is_run_or_a_gap() -> None:
    asked = {aspect for kind in every_kind() for aspect in aspects(*kind)}
    assert asked == KNOWN | set(GAPS)
    assert not KNOWN & set(GAPS)


def test_what_is_not_in_the_table_is_not_runnable() -> None:
    assert gaps(*PLAIN) == ()
    for kind in every_kind():
        assert bool(gaps(*kind)) == (not set(aspects(*kind)) <= KNOWN)
    mixed = MODEL.model_copy(update={"moe": MIXED})
    both = gaps(*needs(model=mixed, precision="fp8", mesh=CUT, tensor_overlap="symmetric"))
    assert [gap.code for gap in both] == ["PT401", "PT405"]


def test_fp8_runs_where_kernels_for_it_are_compiled() -> None:
    for architecture in ("sm_90", "sm_100", "gfx942", "gfx950", ""):
        assert gaps(*needs(precision="fp8", architecture=architecture, mesh=Mesh(tp=2, cp=2))) == ()
    for architecture in ("sm_80", "sm_89", "sm_103", "gfx90a"):
        assert [gap.code for gap in gaps(*needs(precision="fp8", architecture=architecture))] == ["PT489"]
        assert gaps(*needs(precision="bf16", architecture=architecture)) == ()


def test_adapters_run_where_their_sum_is_computed() -> None:
    piped: dict[str, Any] = {"mesh": PIPED, "stages": HALVES}
    model = MODEL.model_copy(update={"adapter": LowRank()})
    dropping = MODEL.model_copy(update={"adapter": LowRank(kind="dora", dropout=0.1)})
    for fields in ({"mesh": CUT, "zero": 3}, {"mlp_tile_tokens": 4}, {"schedule": "zb-v", **piped}, {"expert": 2}):
        assert gaps(*needs(model=model, **fields)) == ()
        assert gaps(*needs(model=dropping, **fields)) == ()
    codes = [{gap.code for gap in gaps(*asked)} for asked in of_adapters(piped)]
    assert codes == [{"PT406"}] * 8 + [set(), {"PT406"}, {"PT406"}]
    rows = Layouts(tensor_inner=np.array([1, 2]), tp=np.array([4, 4]))
    assert able(rows).tolist() == [True, True]
    assert able(rows, model).tolist() == [True, False]


def test_averages_run_where_the_state_is_on_the_device() -> None:
    assert [{gap.code for gap in gaps(*asked)} for asked in of_averages()] == [set(), {"PT424"}, {"PT424"}, {"PT424"}]
    rows = Layouts(gpu_fraction=np.array([1.0, 0.5, 1.0]), offload_parameters=np.array([0, 0, 1]))
    assert able(rows).tolist() == [True, True, True]
    assert able(rows, averages=True).tolist() == [True, False, False]


def test_predictions_run_where_one_rank_has_embedding_and_head() -> None:
    asked = of_predictions({"mesh": PIPED, "stages": HALVES})
    codes = [{gap.code for gap in gaps(*each)} for each in asked]
    assert codes == [set()] * 3 + [{"PT439"}] * 10
    rows = Layouts(pp=np.array([1, 2, 1, 1]), tensor_inner=np.array([1, 1, 2, 1]), tp=np.array([4, 4, 4, 4]))
    assert able(rows, asked[0][0].model).tolist() == [True, False, False, True]
    assert able(rows, MODEL).tolist() == [True, True, True, True]


def test_columns_ask_for_as_much_as_layouts_do() -> None:
    """A search by columns leaves out the layouts that would be refused one by one."""
    plain = Layouts(ep=np.array([1, 2, 1]), tp=np.array([1, 1, 2]), tensor_overlap=np.array([0, 0, 2]))
    assert able(plain).tolist() == [True, True, False]
    named = {aspect for aspect, _ in of_columns(Layouts())}
    assert named <= KNOWN | set(GAPS)
    assert bool(able(Layouts()))

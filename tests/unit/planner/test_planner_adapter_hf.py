"""Adapters of models that transformers builds: what gets one, how ranks share it, what predictions see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_hf_plan import HIDDEN, WIDTH, planned, structure

from partool.layout.adapters import is_adapter
from partool.layout.parameters import count, is_frozen, parameters
from partool.layout.tensor import by_name
from partool.layout.tensor.adapters import shapes
from partool.layout.tensor.structure import Structure, StructureModule
from partool.planner.make import PlanResult
from partool.spec.adapter import LowRank


def described(*more: StructureModule, joined: bool = False) -> Structure:
    """Return the structure of a Llama with classes of torch; ``joined`` has one matrix for queries, keys and values."""
    plain = structure()
    modules = [
        module.model_copy(update={"class_name": "Linear"}) if module.kind == "linear" else module
        for module in plain.modules
    ]
    if joined:
        kept = [module for module in modules if module.name.rpartition(".")[2] not in ("q_proj", "k_proj", "v_proj")]
        modules = kept + [
            StructureModule(
                name=f"model.layers.{layer}.self_attn.qkv_proj", class_name="Linear", kind="linear",
                parameters={"weight": (3 * HIDDEN, HIDDEN)},
            )
            for layer in range(2)
        ]  # fmt: skip
    return plain.model_copy(update={"modules": (*modules, *more)})


def result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: str, made: Structure, parallel: str = "{}", **said: Any
) -> PlanResult:
    data, model = f"python-stdlib\nadapter: {adapter}", ", weights: {source: dummy}"
    return planned(monkeypatch, tmp_path, parallel, model, data=data, structure=made.model_dump(mode="json"), **said)


def test_linear_modules_are_adapted_and_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A is cut as the inputs of its matrix, B and the magnitudes as the outputs."""
    parallel = "{tensor: 2, micro_batch: 1}"
    plan = result(monkeypatch, tmp_path, "{kind: dora, rank: 4, train: [norms]}", described(), parallel).plan
    assert plan is not None
    assert plan.runnable
    names = list(shapes(described(), LowRank(kind="dora", rank=4)))
    trained = {name for name in names if not is_frozen(name, plan.frozen)}
    assert {name for name in trained if not is_adapter(name)} == {name for name in names if "norm" in name}
    assert sum(name.endswith(".magnitude") for name in trained) == 14
    rows = by_name(plan.partition, names)
    assert set(rows) == set(names)
    of = {end: rows[f"model.layers.1.self_attn.q_proj.{end}"] for end in ("lora_a", "lora_b", "magnitude")}
    assert [(of[end].local_shape(0), of[end].gradients) for end in of] == [
        ((4, HIDDEN), "summed"), ((HIDDEN // 2, 4), "whole"), ((HIDDEN // 2,), "whole")
    ]  # fmt: skip
    of = {end: rows[f"model.layers.1.mlp.down_proj.{end}"] for end in ("lora_a", "lora_b", "magnitude")}
    assert [(of[end].local_shape(0), of[end].gradients) for end in of] == [
        ((4, WIDTH // 2), "whole"), ((HIDDEN, 4), "summed"), ((HIDDEN,), "summed")
    ]  # fmt: skip


def test_predictions_are_of_the_same_projections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = result(monkeypatch, tmp_path, "{rank: 4, targets: [qkv_proj, down]}", described(joined=True)).plan
    assert plan is not None
    added = {info.name for info in parameters(plan.model) if is_adapter(info.name)}
    assert added == {
        f"layers.{layer}.{name}.{end}"
        for layer in range(2)
        for name in ("attention.q", "attention.k", "attention.v", "ffn.down")
        for end in ("lora_a", "lora_b")
    }
    trained = [info for info in parameters(plan.model) if not is_frozen(info.name, plan.priced_frozen)]
    assert {info.name for info in trained} == added
    assert plan.prediction.memory.terms_bytes["optimizer"] <= 8.1 * count(trained)
    assert plan.adapter is not None
    assert plan.adapter.targets == ("qkv_proj", "down")


CONV1D = StructureModule(
    name="model.layers.0.mlp.c_fc", class_name="Conv1D", kind="conv1d", parameters={"weight": (8, 16)}
)
EXPERTS = StructureModule(
    name="model.layers.0.mlp.experts", class_name="Experts", kind="experts",
    parameters={"gate_up_proj": (4, 16, HIDDEN), "down_proj": (4, HIDDEN, 8)},
)  # fmt: skip


@pytest.mark.parametrize(
    ("adapter", "more", "expected"),
    [
        ("lora", EXPERTS, [("PT408", "warning", ("adapter", "targets"))]),
        ("{targets: [q_proj, gate_up_proj]}", EXPERTS, [("PT408", "error", ("adapter", "targets", 1))]),
        ("{targets: [c_fc]}", CONV1D, [("PT408", "error", ("adapter", "targets", 0))]),
        ("{targets: [q, querys]}", None, [("PT293", "error", ("adapter", "targets", 1))]),
        ("{train: [norms, lm_head.*, nothing]}", None, [("PT293", "error", ("adapter", "train", 2))]),
    ],
)
def test_what_cannot_have_an_adapter_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: str, more: StructureModule | None, expected: Any
) -> None:
    made = described() if more is None else described(more)
    diagnostics = result(monkeypatch, tmp_path, adapter, made, "{tensor: 1}").diagnostics
    of_adapter = [each for each in diagnostics if each.path[:1] == ("adapter",)]
    assert [(each.code, each.severity, each.path) for each in of_adapter] == expected


def test_modules_of_a_users_own_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = described().model_copy(update={"model_type": "module"})
    assert "PT292" in {each.code for each in result(monkeypatch, tmp_path, "lora", made, "{tensor: 1}").diagnostics}


def test_searches_leave_out_tensor_ranks_with_dropout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cut = result(monkeypatch, tmp_path, "{dropout: 0.1}", described(), "{tensor: 2}").plan
    assert cut is not None
    assert cut.not_runnable == ("PT406",)
    free = result(monkeypatch, tmp_path, "{dropout: 0.1}", described()).plan
    assert free is not None
    assert free.runnable

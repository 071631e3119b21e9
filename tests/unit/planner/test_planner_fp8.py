"""The planner's findings about ``precision: fp8``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from layouts import new_layout

from partool.layout.tensor.structure import Structure, StructureModule
from partool.plan.layout import Layout, Mesh
from partool.planner.findings.fp8 import stay_wide
from partool.spec.model import ModelConfig

BASE: dict[str, Any] = {
    "layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 31
}  # fmt: skip


def problem(precision: str = "fp8", structure: Structure | None = None, **model: Any) -> Any:
    training = SimpleNamespace(precision=precision)
    described = None if structure is None else SimpleNamespace(structure=structure)
    config = ModelConfig(**(BASE | model))
    return SimpleNamespace(spec=SimpleNamespace(training=training), model=config, described=described)


def layout(tensor: int = 1) -> Layout:
    return new_layout(
        mesh=Mesh(tp=tensor), zero=0, micro_batch=1, accumulation=1, recompute=("none",) * 2, compile="none",
        stages=((0, 2),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "tensor", "words"),
    [
        ({}, 1, ""),
        ({}, 2, ""),
        ({"ffn_hidden": 100}, 1, "but ffn.gate, up (100 x 64), ffn.down (64 x 100) stay in bf16"),
        ({"head_dim": 8, "kv_heads": 1}, 1, "k, v (8 x 64) stay"),
        (
            {},
            4,
            "(24 x 64), ffn.down (64 x 24) on each of 4 tensor ranks stay in bf16: their widths are no multiples of 16",
        ),
        ({"hidden": 56, "heads": 4}, 1, "attention.q"),
    ],
)
def test_layers_whose_widths_do_not_fit_are_named(model: dict[str, Any], tensor: int, words: str) -> None:
    found = stay_wide(problem(**model), layout(tensor))
    assert [finding.severity for finding in found] == ["warning"] * bool(words)
    assert not found or words in found[0].message
    assert not stay_wide(problem("bf16", **model), layout(tensor))


def structure(**modules: tuple[str, tuple[int, ...]]) -> Structure:
    return Structure(
        model_type="some", architecture="SomeForCausalLM", blocks="model.layers", embedding="embed", head="head",
        hidden=64, heads=4, kv_heads=2, head_dim=16,
        modules=(
            StructureModule(name="head", class_name="Linear", kind="linear", parameters={"weight": (31, 64)}),
            *(
                StructureModule(name=f"model.layers.{n}.{name}", class_name="X", kind=kind, parameters={"weight": of})
                for n in range(2)
                for name, (kind, of) in modules.items()
            ),
        ),
    )  # fmt: skip


def test_models_of_transformers_are_told_by_their_modules() -> None:
    def found(**modules: tuple[str, tuple[int, ...]]) -> list[Any]:
        return stay_wide(problem(structure=structure(**modules)), layout())

    linear, router = ("linear", (64, 64)), ("router", (3, 64))
    assert not found(q_proj=linear, gate=router)
    (odd,) = found(q_proj=linear, up_proj=("linear", (100, 64)))
    assert "but up_proj of every layer stay in bf16: widths are no multiples of 16" in odd.message
    (experts,) = found(q_proj=linear, experts=("experts", (4, 64, 64)))
    assert "but experts of every layer stay" in experts.message
    assert (odd.severity, experts.severity) == ("warning", "warning")
    (nothing,) = found(c_attn=("conv1d", (64, 64)))
    assert nothing.severity == "error"
    assert "SomeForCausalLM have no linear modules" in nothing.message

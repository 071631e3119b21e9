"""Attention by the kernel measured as fastest: where it is installed, and that models compute the same with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _telemetry import small_plan
from layouts import laid
from torch import nn

from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool.spec.parallel import Recompute
from partool_kernels.select import Candidate, Question, Selector
from partool_kernels.timing import Run
from partool_runtime.fused import attention
from partool_runtime.fused.attention import Selected, put, select_attention
from partool_runtime.model import Decoder
from partool_runtime.model.attention import attend
from partool_runtime.parallel.recompute import recompute

CPU = torch.device("cpu")
MODEL = ModelConfig(layers=3, hidden=20, ffn_hidden=28, heads=6, kv_heads=2, head_dim=8, vocab=37)


class Clock:
    """Timer that reports the last candidate as the fastest."""

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        return [1.0 / (place + 1) for place in range(len(runs))]


def plan_of(model: ModelConfig = MODEL, **training: Any) -> Plan:
    plain = small_plan(model=model)
    training = {"sequence_length": 13, "precision": "fp64"} | training
    return plain.model_copy(update={"training": plain.training.model_copy(update=training)})


def make(model: ModelConfig = MODEL) -> Decoder:
    made, generator = Decoder(model).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made


def same(ours: Decoder, theirs: Decoder, *documents: torch.Tensor) -> None:
    tokens, labels = torch.randint(37, (2, 2, 13), generator=torch.Generator().manual_seed(1))
    both = []
    for model in (ours, theirs):
        loss = model(tokens, labels, *documents)
        both.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    for one, other in zip(*both, strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


def chosen(model: nn.Module) -> list[str]:
    found = [module.core for module in model.modules() if hasattr(module, "core")]
    return [core.answer.name if isinstance(core, Selected) else "attend" for core in found]


def calls(model: Decoder) -> set[str]:
    tokens = torch.zeros(1, 13, dtype=torch.int64)
    with torch.profiler.profile() as seen:
        model(tokens, tokens)
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize("policy", ["none", "attention", "selective"])
def test_a_model_computes_the_same_by_another_kernel(policy: Recompute) -> None:
    ours, theirs = make(), make()
    put(ours, plan_of(), CPU, Selector(Clock()))
    assert chosen(ours) == ["math"] * 3
    if policy == "none":
        assert "aten::_scaled_dot_product_attention_math" in calls(ours)
        assert "aten::_scaled_dot_product_attention_math" not in calls(theirs)
    recompute(ours.layers, [policy] * 3)
    same(ours, theirs)


def test_windows_and_documents_go_the_usual_way() -> None:
    windowed = MODEL.model_copy(update={"window": 4, "attention": ("sliding", "full", "sliding")})
    ours, theirs = make(windowed), make(windowed)
    put(ours, plan_of(windowed), CPU, Selector(Clock()))
    same(ours, theirs)
    documents = torch.tensor([[0] * 6 + [1] * 7] * 2, dtype=torch.int32)
    same(ours, theirs, documents)


@pytest.mark.parametrize("other", [{"sequence_length": 12}, {"precision": "fp32"}])
def test_other_lengths_and_types_than_the_measured_ones_go_the_usual_way(other: dict[str, Any]) -> None:
    ours = make()
    put(ours, plan_of(**other), CPU, Selector(Clock()))
    assert chosen(ours) == ["math"] * 3
    assert "aten::_scaled_dot_product_attention_math" not in calls(ours)


def test_cores_of_others_stay() -> None:
    model = make()
    model.layers[1].attention.core = other = lambda *_: torch.zeros(())
    put(model, plan_of(), CPU, Selector(Clock()))
    assert model.layers[1].attention.core is other
    assert chosen(model) == ["math", "attend", "math"]


def test_where_nothing_works_torch_is_left_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> Sequence[torch.Tensor]:
        raise RuntimeError("no")

    def problem(*_: object) -> Question:
        return Question("attention", (), ("math",), lambda: [Candidate("math", raises)])

    monkeypatch.setattr("partool_kernels.select.attention.problem", problem)
    model = make()
    put(model, plan_of(), CPU, Selector(Clock()))
    assert chosen(model) == ["attend"] * 3


@pytest.mark.parametrize(
    ("precision", "mode", "deterministic", "device"),
    [
        ("bf16", "auto", False, "cpu"),
        ("fp32", "auto", False, "cuda"),
        ("bf16", "torch", False, "cuda"),
        ("bf16", "auto", True, "cuda"),
        ("bf16", "auto", False, "cuda"),
    ],
)
def test_only_narrow_types_on_gpus_are_measured(
    monkeypatch: pytest.MonkeyPatch, precision: str, mode: str, deterministic: bool, device: str
) -> None:
    plan = plan_of(precision=precision, deterministic=deterministic)
    plan = plan.model_copy(update={"kernels": plan.kernels.model_copy(update={"mode": mode})})
    seen: list[str] = []
    monkeypatch.setattr(attention, "put", lambda *_: seen.append("put"))
    monkeypatch.setattr(attention, "selector", lambda _: None)
    select_attention(make(), plan, torch.device(device))
    assert seen == (["put"] if (precision, mode, deterministic, device) == ("bf16", "auto", False, "cuda") else [])


def test_what_else_is_tried_depends_on_what_it_would_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "newer", lambda _: ("flash3",))
    cuda, plan = torch.device("cuda"), plan_of()
    keeps = plan.model_copy(update={"layout": laid(plan.layout, recompute=("selective",) * 3)})
    windowed = plan_of(MODEL.model_copy(update={"window": 4}))
    assert attention._also(plan, CPU) == ()
    assert attention._also(plan, cuda) == ("flash3", "flex")
    assert attention._also(keeps, cuda) == ("flash3",)
    assert attention._also(windowed, cuda) == ("flex",)


# torch means to silence this warning, but where warnings are errors its own check fails.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_may_hold_it() -> None:
    ours, theirs = make(), make()
    put(ours, plan_of(), CPU, Selector(Clock()))
    for layer in ours.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    same(ours, theirs)
    assert attend is theirs.layers[0].attention.core

"""Ownership of parameters by rank (experts, frozen parameters, large heads): the same in time, memory and search."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import laid, new_layout

from partool.catalog.hardware import resolve_hardware
from partool.catalog.models import resolve_model
from partool.cost.case import FULL, Layouts
from partool.cost.training.bound import bound_s
from partool.cost.training.micro import micro
from partool.cost.training.peak import peak_memory, predict_memory
from partool.cost.training.predict import predict_time
from partool.cost.training.step import owned_elements
from partool.cost.training.traffic import traffic
from partool.layout.stages import balance
from partool.plan.layout import Layout, Mesh
from partool.planner import make_plan
from partool.spec import load_text
from partool.spec.hardware import HardwareSpec
from partool.spec.model import ModelConfig, ModelSpec
from partool.work.training import TrainingWork


def model(preset: str) -> ModelConfig:
    found = resolve_model(ModelSpec(preset=preset), Path()).config
    assert found is not None
    return found


def job(preset: str, **changes: object) -> TrainingWork:
    devices = resolve_hardware(HardwareSpec(accelerator="h100-sxm", nodes=8), "bf16").devices
    assert devices is not None
    return TrainingWork(model(preset), devices, 4096, "bf16", global_batch=64, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("ep", [2, 8])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_experts_are_owned_alike_in_time_and_memory(ep: int, tp: int, zero: int) -> None:
    """The optimizer's moments (two of four bytes) belong to the parameters whose update is timed."""
    one = job("mixtral-8x7b")
    dp = 64 // tp
    shards = {"shards": dp} if zero else {"replicas": dp}
    layouts = Layouts(tp=tp, ep=ep, zero=zero, recompute=FULL, **shards)
    costs = micro(one, layouts)
    owned = float(owned_elements(one, layouts, costs.total("dense"), costs.total("expert")))
    moments = float(peak_memory(one, layouts).terms["optimizer"])
    assert owned == pytest.approx(moments / 8, rel=0.01)


def layout(config: ModelConfig, pp: int) -> Layout:
    bounds = balance([1.0] * config.layers, pp)
    return new_layout(
        mesh=Mesh(pp=pp, dp_shard=8), zero=1, micro_batch=1, accumulation=8, recompute=("none",) * config.layers,
        compile="block", stages=bounds,
    )  # fmt: skip


def test_frozen_parameters_have_no_moments_gradients_or_updates() -> None:
    """Only the last pipeline rank has trainable parameters: its norm and head."""
    frozen = job("llama3-8b", frozen=("embed.*", "layers.*"))
    chosen = layout(frozen.model, 8)
    head = 128256 * 4096
    ranks = predict_memory(frozen, chosen, 0.0).ranks
    assert ranks[-1].terms_bytes["optimizer"] == pytest.approx(8 * head / 8, rel=0.01)
    assert all(rank.terms_bytes["optimizer"] == 0 for rank in ranks[:-1])
    whole = job("llama3-8b")
    less, more = predict_time(frozen, chosen, 1), predict_time(whole, chosen, 1)
    assert less.terms_s["optimizer"] < 0.5 * more.terms_s["optimizer"]
    assert less.traffic_bytes["gradient_sync"] < 0.2 * more.traffic_bytes["gradient_sync"]
    # Below ZeRO-3 frozen parameters are whole on each rank; with ZeRO-3 they are gathered as all others.
    assert traffic(frozen, chosen).gather_bytes < 0.2 * traffic(whole, chosen).gather_bytes
    assert (traffic(frozen, chosen).gather_calls, traffic(frozen, chosen).reduce_calls) == (1, 1)
    gathered = laid(chosen, zero=3)
    assert traffic(frozen, gathered).gather_bytes == traffic(whole, gathered).gather_bytes


@pytest.mark.parametrize("pp", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_bounds_hold_for_heads_that_weigh_as_much_as_layers(pp: int, schedule: str) -> None:
    thin = ModelConfig(layers=12, hidden=512, ffn_hidden=1024, heads=8, kv_heads=8, head_dim=64, vocab=256000)
    one = TrainingWork(thin, job("llama3-8b").devices, 2048, "bf16", global_batch=64)
    columns = Layouts(
        pp=pp, replicas=8, accumulation=8, schedule=("gpipe", "1f1b", "interleaved", "zb-h1").index(schedule)
    )
    costs = micro(one, columns)
    unit = next(iter(costs.layers.values()))
    bounds = balance([float(unit.both_s)] * 12, pp, float(costs.first.both_s), float(costs.last.both_s))
    exact = new_layout(
        mesh=Mesh(pp=pp, dp_replicate=8), zero=0, micro_batch=1, accumulation=8, recompute=("none",) * 12,
        compile="block", stages=bounds, schedule=schedule,
    )  # fmt: skip
    assert float(bound_s(one, columns)) <= predict_time(one, exact, 1).step_time_s * 1.001


def test_a_layout_that_gives_the_head_room_is_found() -> None:
    """An even split would need 13.5 GiB; with fewer layers on the head's stage 11.7 GiB are enough."""
    text = (
        "model: llama3.2-1b\nhardware: {accelerator: h100-sxm, per_node: 8, memory_gib: 13.5}\ndata: python-stdlib\n"
        "training: {sequence_length: 4096, global_batch: 64}\nparallel: {data: {zero: 3}, tensor: 1, sequence: 1, "
        "pipeline: {stages: 4, schedule: gpipe}, micro_batch: 2, recompute: full, "
        "offload: {optimizer: none, parameters: none, activations: none}}\n"
    )
    spec = load_text(text).spec
    assert spec is not None
    assert make_plan(spec, base_dir=Path(), default_name="test").plan is not None

"""The cost model's equations against figures worked out by hand, and their order."""

from __future__ import annotations

from typing import Any

import pytest

from partool.cost import Work, predict_memory, predict_time
from partool.cost.activations import layer_bytes
from partool.cost.compute import matmul_flops_per_token, model_flops
from partool.cost.memory import fit_probability
from partool.cost.traffic import gather_calls, reduce_calls, traffic_bytes
from partool.layout.parameters import count, groups, parameters
from partool.plan.terms import MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS
from partool.plan.types import Layout, Mesh
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.training import TrainingSpec

GIB = 2**30
MODEL = ModelConfig(layers=2, hidden=8, ffn_hidden=12, heads=4, kv_heads=2, head_dim=2, vocab=24)
GPU = Devices(
    accelerator="test",
    backend="cuda",
    nodes=4,
    per_node=2,
    memory_bytes=80 * GIB,
    peak_flops=1e15,
    achievable_flops=8e14,
    memory_bytes_per_s=2e12,
    link_bytes_per_s=4e11,
    fabric_bytes_per_s=5e10,
)


def work(
    shard: int = 4,
    replicate: int = 1,
    zero: Any = 3,
    accumulation: int = 1,
    precision: Any = "bf16",
    recompute: Any = "none",
    compile: Any = "none",
    model: ModelConfig = MODEL,
    frozen: tuple[str, ...] = (),
) -> Work:
    layout = Layout(
        mesh=Mesh(dp_replicate=replicate, dp_shard=shard),
        zero=zero,
        micro_batch=2,
        accumulation=accumulation,
        recompute=(recompute,) * model.layers,
        compile=compile,
        stages=((0, model.layers),),
    )
    batch = 2 * accumulation * shard * replicate
    training = TrainingSpec(sequence_length=16, global_batch=batch, precision=precision)
    return Work(model, layout, training, GPU, frozen)


N = count(parameters(MODEL))
LAST = count(groups(MODEL)[-1])


def test_elements_by_hand() -> None:
    layer = 2 * 8 + (8 * 8 + 2 * 4 * 8 + 8 * 8) + 3 * 12 * 8
    assert 24 * 8 + 2 * layer + 8 + 24 * 8 == N
    assert LAST == 8 + 24 * 8


@pytest.mark.parametrize(
    ("zero", "shard", "replicate", "k", "reduced", "gathered"),
    [
        (0, 1, 4, 3, 2 * 3 / 4 * 4 * N, 0),
        (1, 4, 1, 1, 3 / 4 * 4 * N, 3 / 4 * 2 * N),
        (1, 4, 1, 3, 3 / 4 * 4 * N, 3 / 4 * 2 * N),
        (2, 4, 1, 3, 3 * 3 / 4 * 4 * N, 3 / 4 * 2 * N),
        (3, 4, 1, 1, 3 / 4 * 4 * N, 3 / 4 * 2 * (2 * N - LAST)),
        (3, 4, 1, 3, 3 * 3 / 4 * 4 * N, 3 * 3 / 4 * 2 * (2 * N - LAST)),
        (3, 2, 4, 1, 1 / 2 * 4 * N + 2 * 3 / 4 * 4 * N / 2, 1 / 2 * 2 * (2 * N - LAST)),
    ],
)
def test_traffic_by_hand(zero: int, shard: int, replicate: int, k: int, reduced: float, gathered: float) -> None:
    """bf16: gathers move 2 bytes per element, reductions 4; a ring sends (n-1)/n of the whole."""
    got = traffic_bytes(work(shard, replicate, zero, k))
    assert set(got) == set(TRAFFIC_TERMS)
    assert got["gradient_sync"] == pytest.approx(reduced, abs=1)
    assert got["parameter_gather"] == pytest.approx(gathered, abs=1)


def test_number_of_collectives() -> None:
    """The model has four groups: embedding, two layers, norm with head."""
    assert (gather_calls(work(zero=1, accumulation=3)), reduce_calls(work(zero=1, accumulation=3))) == (4, 4)
    assert (gather_calls(work(zero=2, accumulation=3)), reduce_calls(work(zero=2, accumulation=3))) == (4, 12)
    assert (gather_calls(work(zero=3, accumulation=3)), reduce_calls(work(zero=3, accumulation=3))) == (21, 12)
    assert (gather_calls(work(1, 4, 0)), reduce_calls(work(1, 4, 0))) == (0, 4)


def test_state_by_hand() -> None:
    def terms(**changes: Any) -> dict[str, int]:
        return predict_memory(work(**changes), 0.1).terms_bytes

    assert list(terms()) == list(MEMORY_TERMS)
    one, three = terms(zero=1, accumulation=2), terms(zero=3, accumulation=2)
    assert (one["parameters"], one["optimizer"]) == (4 * -(-N // 4), 8 * N // 4)
    assert (one["gathered"], one["gradients"]) == (2 * N, 4 * N)
    assert terms(zero=2, accumulation=2)["gradients"] == 4 * N // 4 == three["gradients"]
    layer = count(groups(MODEL)[1])
    assert three["gathered"] == 2 * (2 * layer + LAST)
    assert terms(shard=1, replicate=4, zero=0)["optimizer"] == 8 * N
    embedding = 24 * 8
    assert terms(frozen=("embed.*",))["optimizer"] == pytest.approx(8 * (N - embedding) / 4, abs=1)


def test_saved_tensors_by_hand() -> None:
    """Per token of one layer; sizes: hidden 8, queries 8, keys 4, inner 12, four heads; 32 tokens."""
    norms = 2 * (8 * (4 + 2 * 4) + 4)
    assert layer_bytes(work(precision="fp32"), "none", 0) == 32 * (norms + 4 * (8 + 4 + 4 + 8 + 4 * 12) + 4 * 4)
    norms = 2 * (8 * (4 + 2 * 2) + 4)
    assert layer_bytes(work(), "none", 0) == 32 * (norms + 2 * (24 + 48) + 4 * 4)
    assert layer_bytes(work(), "full", 0) == 32 * 2 * 8
    assert layer_bytes(work(), "selective", 0) == 32 * 2 * (3 * 8 + 24 + 2 * 12)
    gpt = MODEL.model_copy(update={"norm": "layernorm", "activation": "gelu"})
    fp32 = work(precision="fp32", model=gpt)
    assert layer_bytes(fp32, "none", 0) == 32 * (2 * (2 * 8 * 4 + 8) + 4 * (24 + 2 * 12) + 16)


def test_flops_by_hand() -> None:
    """Two per weight of every matrix but the embedding, and attention's scores and values over half the sequence."""
    matrices = 2 * ((8 * 8 + 2 * 4 * 8 + 8 * 8) + 3 * 12 * 8) + 24 * 8
    assert matmul_flops_per_token(work()) == 2 * matrices
    tokens = 2 * 4 * 16
    assert model_flops(work()) == 3 * tokens * (2 * matrices + 2 * 4 * (16 / 2) * 8)
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    assert matmul_flops_per_token(work(model=tied)) == 2 * matrices


def test_order() -> None:
    totals = [predict_memory(work(zero=zero, accumulation=2), 0.1).total_bytes for zero in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)
    kept = [predict_memory(work(recompute=policy), 0.1).terms_bytes["activations"] for policy in ("none", "full")]
    assert kept == sorted(kept, reverse=True)
    backward = [predict_time(work(recompute=policy)).terms_s["backward"] for policy in ("none", "selective", "full")]
    assert backward == sorted(backward)
    time = predict_time(work())
    assert list(time.terms_s) == list(TIME_TERMS)
    assert time.step_time_s == pytest.approx(sum(time.terms_s.values()))
    assert time.tokens_per_s == pytest.approx(2 * 4 * 16 / time.step_time_s)


def test_a_group_inside_a_node_is_faster_than_one_across() -> None:
    inside, across = work(2, 4), work(8, 1)
    assert predict_time(inside).terms_s["parameter_gather"] < predict_time(across).terms_s["parameter_gather"]


def test_probability_of_fitting() -> None:
    assert fit_probability(50.0, 50.0) == pytest.approx(0.5)
    assert fit_probability(1.0, 100.0) == pytest.approx(1.0)
    assert fit_probability(1.0, 0.0) == 0.0
    assert fit_probability(40.0, 50.0) > fit_probability(45.0, 50.0)

"""The time model's equations against figures worked out by hand, and properties of every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import new_layout

from partool.cost import collective
from partool.cost.case import RECOMPUTE, SCHEDULES, SELECTIVE, Layouts
from partool.cost.codec import encode
from partool.cost.kinds import Kind, kinds
from partool.cost.time.attention import attention_s, keys_seen
from partool.cost.time.gemm import matmul_s, streamed_s
from partool.cost.time.head import head_s
from partool.cost.time.layer import layer
from partool.cost.training.bound import bound_s
from partool.cost.training.micro import micro
from partool.cost.training.offload import offload
from partool.cost.training.predict import attention_flops_per_token, matmul_flops_per_token, model_flops, predict_time
from partool.cost.training.traffic import traffic, traffic_bytes
from partool.layout.parameters import count, groups, parameters
from partool.layout.stages import balance
from partool.plan.layout import Layout, Mesh
from partool.plan.terms import TIME_PARTS, TIME_TERMS, TRAFFIC_TERMS
from partool.spec.experts import Moe
from partool.spec.hardware import Devices
from partool.spec.model import Mla, ModelConfig
from partool.spec.training import Fused
from partool.work.stacks import PARTOOL, STACKS, own_stack
from partool.work.training import TrainingWork

SMALL = ModelConfig(layers=2, hidden=8, ffn_hidden=12, heads=4, kv_heads=2, head_dim=2, vocab=24)
LARGE = ModelConfig(layers=32, hidden=4096, ffn_hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
GPU = Devices(
    accelerator="test", backend="cuda", nodes=4, per_node=8, memory_bytes=80 * 2**30, peak_flops=1e15,
    achievable_flops=8e14, units=132, memory_bytes_per_s=3e12, link_bytes_per_s=4e11, fabric_bytes_per_s=5e10,
    host_link_bytes_per_s=5e10, host_memory_bytes=2**40,
)  # fmt: skip
CPU = GPU.model_copy(update={"backend": "cpu", "units": 0, "achievable_flops": 1e11, "peak_flops": None})


def job(model: ModelConfig = LARGE, devices: Devices = GPU, **changes: Any) -> TrainingWork:
    values = {"sequence_length": 4096, "global_batch": 64, "precision": "bf16"} | changes
    return TrainingWork(model, devices, **values)


def devices(**figures: Any) -> Devices:
    return GPU.model_copy(update=figures)


# A single matrix product.


def test_a_large_product_runs_at_the_achievable_rate() -> None:
    seconds = matmul_s(job(), 16384, 16384, 16384)
    assert seconds == pytest.approx(2 * 16384**3 / 8e14, rel=0.06)


def test_products_lose_to_shape() -> None:
    whole = matmul_s(job(), 8192, 8192, 8192)
    assert matmul_s(job(), 8192, 8192 + 8, 8192) > 1.1 * whole
    assert matmul_s(job(), 8192, 8192 + 1, 8192) > 1.5 * whole
    # 132 units: 11 × 12 tiles are one full wave, 12 × 12 need two.
    one, two = matmul_s(job(), 128 * 11, 128 * 12, 8192), matmul_s(job(), 128 * 12, 128 * 12, 8192)
    assert two > 1.2 * 12 / 11 * one
    assert matmul_s(job(), 4096, 4096, 4096, batch=2) < 2.0 * matmul_s(job(), 4096, 4096, 4096)


def test_a_thin_product_is_bound_by_memory() -> None:
    seconds = matmul_s(job(), 1, 8192, 8192)
    assert seconds == pytest.approx(2 * 8192 * 8192 / (0.85 * 3e12), rel=0.15)


def test_a_cpu_has_no_waves() -> None:
    assert matmul_s(job(devices=CPU), 100, 100, 100) == pytest.approx(2e6 / 1e11)


def test_wide_products_under_fp8_use_the_wide_rate() -> None:
    narrow = job(devices=devices(wide_flops=4e14), precision="fp8")
    assert matmul_s(narrow, 16384, 16384, 16384, wide=True) > 1.9 * matmul_s(narrow, 16384, 16384, 16384)


# Collectives.


def test_tiers() -> None:
    """Eight ranks per node; a ring over nodes uses the adapters of all members in a node, of a rack at most eight."""
    inside = collective.group(job(), 8, 1)
    assert (inside.size, inside.inside, inside.domains) == (8, 8, 1)
    across = collective.group(job(), 32, 1)
    assert (across.inside, across.domains) == (8, 4)
    thin = collective.group(job(), 4, 8)
    assert (thin.inside, thin.domains) == (1, 4)
    assert collective.rate(job(), inside) == np.inf
    assert collective.rate(job(), across) == pytest.approx(8 * 0.85 * 5e10)
    assert collective.rate(job(), thin) == pytest.approx(0.85 * 5e10)
    rack = job(devices=devices(domain=32))
    assert collective.rate(rack, collective.group(rack, 32, 1)) == np.inf
    assert collective.rate(rack, collective.group(rack, 64, 1)) == pytest.approx(8 * 0.85 * 5e10)


def test_a_mesh_gives_a_pair_one_link() -> None:
    mesh = job(devices=devices(topology="mesh", link_bytes_per_s=448e9, pair_bytes_per_s=64e9, backend="rocm"))
    assert collective._ring_bytes_per_s(collective._link(mesh.devices), 2) == pytest.approx(0.70 * 64e9)
    assert collective._ring_bytes_per_s(collective._link(mesh.devices), 4) == pytest.approx(0.70 * 3 * 64e9)
    assert collective._ring_bytes_per_s(collective._link(mesh.devices), 8) == pytest.approx(0.70 * 448e9)


def test_rings_move_their_share() -> None:
    """The devices of these tests have no measured table."""
    ranks = collective.group(job(), 8, 1)
    start = 10e-6 * (1 + 0.4 * 7)
    assert collective.gather_s(job(), 8e9, ranks) == pytest.approx(start + 7e9 / (0.78 * 4e11))
    assert collective.reduce_scatter_s(job(), 8e9, ranks) == collective.gather_s(job(), 8e9, ranks)
    assert collective.all_reduce_s(job(), 8e9, ranks) == pytest.approx(2 * start + 14e9 / (0.78 * 4e11))
    assert collective.all_reduce_s(job(), 8e9, collective.group(job(), 1, 1)) == 0.0


def test_collectives_across_nodes_do_the_work_of_a_node_and_of_the_network_at_the_same_time() -> None:
    """Four nodes of eight ranks: 21 hops of a ring beyond a node's and three between nodes, or two doublings."""
    across = collective.group(job(), 32, 1)
    node = 10e-6 * (1 + 0.4 * 7)
    ring = 0.1 * 10e-6 * 21 + 0.4 * 25e-6 * 3
    assert collective.gather_s(job(), 0.0, across) == pytest.approx(node + ring)
    more = 0.3 * 10e-6 * 21 + 37.5e-6
    inside, network = node + 7e9 / (0.78 * 4e11), 8e9 * 31 / 32 / (8 * 0.85 * 5e10)
    assert collective.gather_s(job(), 8e9, across) == pytest.approx(ring + more + max(inside, network) + 60e-6)
    tree = 2 * 0.4 * 25e-6
    assert collective.all_reduce_s(job(), 0.0, across) == pytest.approx(2 * node + tree)
    two = collective.group(job(), 16, 1)
    network = 8e9 / (8 * 0.85 * 5e10)
    inside = 2 * node + 14e9 / (0.78 * 4e11)
    once = 0.4 * 25e-6 + 37.5e-6 + max(inside, network) + 60e-6
    assert collective.all_reduce_s(job(), 8e9, two) == pytest.approx(once), "a tree of two nodes sends sums once"


def test_all_to_all_is_as_slow_as_its_slower_tier() -> None:
    across = collective.group(job(), 32, 1)
    start = 25e-6 * np.log2(4 + 1)
    assert collective.all_to_all_s(job(), 32e9, across) == pytest.approx(start + 24e9 / (0.85 * 5e10))


def test_kernels_that_send_a_token_once_send_it_to_each_node_and_each_rank_once() -> None:
    """Of 8 experts on 4 nodes of 8 ranks a token meets 3.6 nodes and 7.2 ranks."""
    across = collective.group(job(), 32, 1)
    nodes, ranks = 4 * (1 - 0.75**8), 32 * (1 - (31 / 32) ** 8)
    network, link = 1e9 * nodes * 0.75 / (0.9 * 5e10), 1e9 * (1 / 2e11 + ranks / (1.2 * 4e11))
    start = 75e-6 + 2 * 65e-6
    assert collective.token_exchange_s(job(), 1e9, across, 8) == pytest.approx(start + 2 * max(network, link))
    inside = collective.group(job(), 8, 1)
    link = 1e9 * (1 / 2e11 + 8 * (1 - 0.875**8) / (1.2 * 4e11))
    assert collective.token_exchange_s(job(), 1e9, inside, 8) == pytest.approx(75e-6 + 2 * link)
    assert collective.token_exchange_s(job(), 1e9, collective.group(job(), 1, 1), 8) == 0.0


# Attention.


def test_keys_seen() -> None:
    assert keys_seen(100, None) == 50
    assert keys_seen(100, 100) == keys_seen(100, 1000) == 50
    # Rows 0..9 see 0.5, 1.5, ... keys; the others 10, in the continuum: 10 - 10*10/200.
    assert keys_seen(100, 10) == pytest.approx(9.5)


def test_attention_counts_causal_pairs_once() -> None:
    rate = 0.5 * 1e15
    seconds = attention_s(job(), Layouts(), backward=False)
    assert seconds == pytest.approx(4 * 4096 * 2048 * 4096 / rate, rel=0.05)
    assert attention_s(job(), Layouts(), Kind(512, False), backward=False) < 0.3 * seconds
    assert attention_s(job(), Layouts(tp=4), backward=False) == pytest.approx(seconds / 4, rel=0.1)


# Layers.


def test_recomputation_costs_what_it_runs_again() -> None:
    backward = {
        policy: float(micro(job(), Layouts(recompute=index)).layers[kinds(LARGE)[0]].backward_s)
        for index, policy in enumerate(RECOMPUTE)
    }
    forward = float(micro(job(), Layouts()).layers[kinds(LARGE)[0]].forward_s)
    assert backward["none"] < backward["selective"] < backward["full"]
    assert backward["none"] < backward["attention"] < backward["full"]
    # The layer's last product, a third of the feed-forward network, is read by no backward pass.
    again = backward["full"] - backward["none"]
    assert 0.72 * forward < again < 0.82 * forward


def test_products_of_a_layer_follow_its_flops() -> None:
    found = layer(job(), Layouts(micro_batch=4), kinds(LARGE)[0])
    flops = 2 * 4 * 4096 * (4096 * 4096 * 2 + 4096 * 2048 + 3 * 4096 * 14336)
    assert found.forward.matmul_s == pytest.approx(PARTOOL.derate * flops / 8e14, rel=0.08)
    assert found.backward.matmul_s == pytest.approx(2 * found.forward.matmul_s, rel=0.05)


def test_experts_cost_their_visits_and_their_transfers() -> None:
    model = LARGE.model_copy(update={"moe": Moe(experts=8, top_k=2, ffn_hidden=14336)})
    dense, moe = layer(job(), Layouts(), kinds(LARGE)[0]), layer(job(model), Layouts(), kinds(model)[0])
    # Two visits and 1.1 times the mean load take 2.2 times a dense network's FLOPs; Triton's kernels, which partool
    # runs, reached 0.28 to 0.58 of the dense rate on an A100, which prices devices that nobody measured.
    assert 2.2 / 0.58 < moe.forward.matmul_s / dense.forward.matmul_s < 2.2 / 0.28
    assert moe.forward.expert_s == 0.0
    near, far = (layer(job(model), Layouts(shards=32, ep=ep), kinds(model)[0]).forward.expert_s for ep in (8, 16))
    assert 0 < near < far


def test_experts_keep_the_host_busier() -> None:
    model = LARGE.model_copy(update={"moe": Moe(experts=8, top_k=2, ffn_hidden=14336)})
    dense, moe = layer(job(), Layouts(), kinds(LARGE)[0]), layer(job(model), Layouts(), kinds(model)[0])
    more = moe.forward.host_s - dense.forward.host_s
    assert more == pytest.approx(PARTOOL.operators_expert * 7e-6)
    assert moe.backward.host_s - dense.backward.host_s == pytest.approx(2 * more)


def test_tensor_ranks_of_torch_copy_and_gather_again() -> None:
    """Each all-reduce stands for a gather and a reduce-scatter, which read and write the whole residual stream."""
    plain = replace(STACKS["fsdp2-compiled"], tensor_copies=0.0, selective_gathers=False)
    torch, megatron = (
        layer(replace(job(), stack=stack), Layouts(tp=4, recompute=SELECTIVE, recompute_share=1.0), kinds(LARGE)[0])
        for stack in (STACKS["fsdp2-compiled"], plain)
    )
    stream_bytes = 4096 * 4096 * 2
    copied_s = 2 * 2 * STACKS["fsdp2-compiled"].tensor_copies * streamed_s(job(), 2.0 * stream_bytes)
    assert torch.forward.tensor_s - megatron.forward.tensor_s == pytest.approx(copied_s)
    assert megatron.recompute.exposed["tensor_parallel"] == 0.0
    half = 0.5 * torch.forward.exposed["tensor_parallel"]
    assert torch.recompute.exposed["tensor_parallel"] == pytest.approx(half)


def test_partool_copies_gathered_tokens_of_several_sequences() -> None:
    """Gathers and reduce-scatters of one sequence are views, and all-reduces have no order."""
    stack = replace(PARTOOL, tensor_copies=0.0)

    def copied_s(batch: int, shares: int) -> float:
        layouts = Layouts(tp=4, sequence_norms=shares, micro_batch=batch)
        whole, none = (layer(replace(job(), stack=one), layouts, kinds(LARGE)[0]) for one in (PARTOOL, stack))
        return float(whole.forward.tensor_s - none.forward.tensor_s)

    assert copied_s(2, 1) == pytest.approx(4 * streamed_s(job(), 2.0 * 2 * 4096 * 4096 * 2))
    assert (copied_s(1, 1), copied_s(2, 0)) == (0.0, 0.0)


def test_latent_attention_counts_all_its_products() -> None:
    mla = Mla(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    model = LARGE.model_copy(update={"mla": mla, "kv_heads": 32})
    found = layer(job(model, sequence_length=8192), Layouts(), kinds(model)[0])
    weights = 4096 * 1536 + 1536 * 32 * 192 + 4096 * 576 + 512 * 32 * 256 + 32 * 128 * 4096 + 3 * 4096 * 14336
    assert found.forward.matmul_s == pytest.approx(PARTOOL.derate * 2 * 8192 * weights / 8e14, rel=0.15)


def test_small_work_waits_for_its_host() -> None:
    tiny = layer(job(SMALL, sequence_length=8), Layouts(), kinds(SMALL)[0])
    assert tiny.forward.total_s(job(SMALL)) == pytest.approx(PARTOOL.operators_forward * 7e-6, rel=0.3)


def test_flops_by_hand() -> None:
    layer_weights = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 12
    assert matmul_flops_per_token(SMALL) == 2 * (2 * layer_weights + 24 * 8)
    assert attention_flops_per_token(SMALL, 16) == 2 * 4 * 8 * 8
    one = job(SMALL, sequence_length=16, global_batch=3)
    assert model_flops(one) == 3 * 48 * (matmul_flops_per_token(SMALL) + attention_flops_per_token(SMALL, 16))


# Host memory.


def test_offload_is_exposed_where_nothing_hides_it() -> None:
    layouts = Layouts(gpu_fraction=0.0)
    cost = offload(job(), layouts, 1e9, saved_bytes=0.0, passes_s=1.0, last_s=0.0)
    # One pass reads the new and the deferred gradient, reads and writes three fp32 states, and writes bf16 weights.
    adam = (2 + 2 + 24 + 2) * 1e9 / (0.5 * 200e9 / 8)
    assert cost.optimizer_s == pytest.approx(adam)
    # Eight devices share 200 GB/s of host memory, less than their links' sum. Nothing overlaps the last bucket.
    lag = 2**25 / 1e9 * (adam + 2 * 2e9 / 2e10)
    assert cost.exposed_s == pytest.approx(adam + lag)
    wide = job(devices=devices(host_memory_bytes_per_s=8e11))
    alone = offload(wide, layouts, 1e9, saved_bytes=0.0, passes_s=1.0, last_s=0.0)
    assert alone.transfer_s == pytest.approx(4e9 / 4e10)
    hidden = offload(job(), layouts, 1e9, saved_bytes=0.0, passes_s=9.0, last_s=9.0)
    assert hidden.exposed_s < 0.3 * cost.exposed_s
    assert offload(job(), Layouts(), 1e9, saved_bytes=1e9, passes_s=1.0, last_s=0.0).exposed_s == 0.0
    none = job(devices=devices(host_link_bytes_per_s=None))
    assert offload(none, layouts, 1e9, saved_bytes=0.0, passes_s=1.0, last_s=0.0).exposed_s == 0.0


# Traffic.

N = count(parameters(SMALL))
LAST = count(groups(SMALL)[-1])


def layout(
    *, shard: int = 1, replicate: int = 1, zero: Any = 0, k: int = 1, pp: int = 1, chunks: int = 1, tp: int = 1,
    cp: int = 1, expert: int = 1, schedule: str = "1f1b", recompute: Any = "none", model: ModelConfig = SMALL,
    micro_batch: int = 1, **more: Any,
) -> Layout:  # fmt: skip
    return new_layout(
        mesh=Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp),
        expert=expert,
        zero=zero,
        micro_batch=micro_batch,
        accumulation=k,
        recompute=(recompute,) * model.layers,
        compile="block",
        stages=balance([1.0] * model.layers, pp * chunks),
        schedule=schedule,
        chunks=chunks,
        **more,
    )


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
    got = traffic_bytes(job(SMALL), layout(shard=shard, replicate=replicate, zero=zero, k=k))
    assert set(got) == set(TRAFFIC_TERMS)
    assert got["gradient_sync"] == pytest.approx(reduced, abs=1)
    assert got["parameter_gather"] == pytest.approx(gathered, abs=1)


def test_number_of_collectives() -> None:
    """The model has four groups: embedding, two layers, norm with head."""

    def calls(**changes: Any) -> tuple[int, int]:
        found = traffic(job(SMALL), layout(**changes))
        return found.gather_calls, found.reduce_calls

    assert calls(shard=4, zero=1, k=3) == (4, 4)
    assert calls(shard=4, zero=2, k=3) == (4, 12)
    assert calls(shard=4, zero=3, k=3) == (21, 12)
    assert calls(replicate=4, zero=0) == (0, 4)


# Whole steps.

choices = st.fixed_dictionaries(
    {
        "pp": st.sampled_from([1, 2, 4]),
        "tp": st.sampled_from([1, 2, 4, 8]),
        "cp": st.sampled_from([1, 2]),
        "shard": st.sampled_from([1, 2, 8]),
        "zero": st.sampled_from([0, 1, 2, 3]),
        "k": st.sampled_from([4, 8, 24]),
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]),
        "recompute": st.sampled_from(["none", "attention", "selective", "full"]),
        "micro_batch": st.sampled_from([1, 2]),
        "offload_optimizer": st.sampled_from(["none", "cpu"]),
        "offload_activations": st.sampled_from(["none", "cpu"]),
    }
)


def legal(values: dict[str, Any]) -> Layout:
    values = dict(values)
    if values["pp"] == 1:
        values["schedule"] = "1f1b"
    chunks = 2 if values["schedule"] == "interleaved" else 1
    shard = values.pop("shard")
    own = {"shard": shard} if values["zero"] else {"replicate": shard}
    return layout(model=LARGE, chunks=chunks, **own, **values)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(choices)
def test_the_bound_is_below_the_prediction_and_terms_sum_up(values: dict[str, Any]) -> None:
    chosen = legal(values)
    world = chosen.mesh.dp * chosen.micro_batch * chosen.derived.accumulation
    one = job(global_batch=world)
    predicted = predict_time(one, chosen, 10)
    assert list(predicted.terms_s) == list(TIME_TERMS)
    assert list(predicted.breakdown_s) == list(TIME_PARTS)
    assert all(value >= 0 for value in predicted.terms_s.values())
    assert all(value >= -1e-12 for value in predicted.breakdown_s.values())
    assert predicted.step_time_s == pytest.approx(sum(predicted.terms_s.values()))
    assert float(bound_s(one, encode(chosen))) <= predicted.step_time_s * 1.001
    slow = job(global_batch=world, time_scalar=1.5)
    assert predict_time(slow, chosen, 10).step_time_s == pytest.approx(1.5 * predicted.step_time_s)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    choices, st.sampled_from(["link_bytes_per_s", "fabric_bytes_per_s", "host_link_bytes_per_s", "achievable_flops"])
)
def test_faster_hardware_never_slows_a_layout(values: dict[str, Any], figure: str) -> None:
    chosen = legal(values)
    world = chosen.mesh.dp * chosen.micro_batch * chosen.derived.accumulation
    before = predict_time(job(global_batch=world), chosen, 10).step_time_s
    better = devices(**{figure: 2.0 * getattr(GPU, figure)})
    assert predict_time(job(devices=better, global_batch=world), chosen, 10).step_time_s <= before * (1 + 1e-9)


def test_columns_price_like_single_layouts() -> None:
    rng = np.random.default_rng(0)
    size = 50
    values = {
        "pp": 2 ** rng.integers(0, 4, size), "tp": 2 ** rng.integers(0, 4, size), "cp": 2 ** rng.integers(0, 2, size),
        "shards": 2 ** rng.integers(0, 6, size), "zero": rng.integers(0, 4, size),
        "recompute": rng.integers(0, 4, size), "accumulation": rng.integers(8, 64, size),
        "schedule": rng.integers(0, len(SCHEDULES), size), "micro_batch": rng.integers(1, 5, size),
    }  # fmt: skip
    together = bound_s(job(), Layouts(**values))
    for index in range(size):
        alone = bound_s(job(), Layouts(**{name: column[index] for name, column in values.items()}))
        assert float(alone) == pytest.approx(float(together[index]), rel=1e-12)


def test_a_pipeline_idles_as_its_schedule_says() -> None:
    """With equal stages 1F1B idles for (p - 1) micro-batches; interleaving divides that by the number of chunks."""
    model = LARGE.model_copy(update={"vocab": 64, "layers": 32})
    plain = predict_time(job(model), layout(model=model, pp=4, k=8, micro_batch=2), 1)
    busy = plain.terms_s["forward"] + plain.terms_s["backward"]
    assert plain.terms_s["pipeline_bubble"] / busy == pytest.approx(3 / 8, rel=0.05)
    chunked = predict_time(
        job(model), layout(model=model, pp=4, chunks=4, k=8, schedule="interleaved", micro_batch=2), 1
    )
    assert chunked.terms_s["pipeline_bubble"] / busy == pytest.approx(3 / 8 / 4, rel=0.25)
    zero_bubble = predict_time(job(model), layout(model=model, pp=4, k=8, schedule="zb-h1", micro_batch=2), 1)
    assert zero_bubble.terms_s["pipeline_bubble"] < 0.6 * plain.terms_s["pipeline_bubble"]


def test_tensor_parallelism_across_nodes_collapses() -> None:
    inside = predict_time(job(), layout(model=LARGE, tp=8, shard=4, zero=1, k=16), 1).step_time_s
    across = predict_time(job(), layout(model=LARGE, tp=32, k=64), 1).step_time_s
    assert across > 2.0 * inside


def test_own_rows() -> None:
    compiled = own_stack("cuda", "block")
    assert compiled == replace(PARTOOL, experts=own_stack("cuda", "none"))
    assert own_stack("cuda", "none").elementwise > PARTOOL.elementwise
    assert own_stack("cpu", "none").overlap_gradients == 0.0


def test_layers_with_experts_are_never_compiled() -> None:
    model = LARGE.model_copy(update={"moe": Moe(experts=8, top_k=2, ffn_hidden=14336, first_dense_layers=1)})
    compiled, eager = (job(model, stack=own_stack("cuda", how)) for how in ("block", "none"))
    dense, experts = (next(kind for kind in kinds(model) if kind.moe is moe) for moe in (False, True))
    assert layer(compiled, Layouts(), experts) == layer(eager, Layouts(), experts)
    assert layer(compiled, Layouts(), dense).forward.host_s < 0.2 * layer(eager, Layouts(), dense).forward.host_s


def test_the_host_recomputes_slowly_in_layers_that_are_not_compiled() -> None:
    """Steps of docs/results/gpu.md that the host limits: a checkpoint takes it longer than both passes."""
    eager = job(stack=own_stack("cuda", "none"))
    again = layer(eager, Layouts(recompute=RECOMPUTE.index("full")), kinds(LARGE)[0])
    assert again.recompute.host_s == pytest.approx(4.5 * again.forward.host_s)
    eight = layer(replace(eager, precision="fp8"), Layouts(), kinds(LARGE)[0])
    assert eight.backward.host_s - again.backward.host_s == pytest.approx(
        2 * (eight.forward.host_s - again.forward.host_s)
    )
    assert eight.forward.host_s > 1.5 * again.forward.host_s


def test_a_fused_loss_spares_the_second_product() -> None:
    """Above the size limit, and in tiles, logits are computed twice, unless gradients are computed in the same pass."""
    plain, fused = job(stack=own_stack("cuda", "block")), job(stack=own_stack("cuda", "block", ("loss",)))
    for layouts, parts in (
        (Layouts(), 3 / 2),
        (Layouts(loss_tile_tokens=1024), 3 / 2),
        (Layouts(loss_tile_tokens=8192), 1),
    ):
        twice, once = (float(head_s(asked, layouts, backward=True)) for asked in (plain, fused))
        assert twice / once == pytest.approx(parts, rel=0.1)
    for name, early in (("1f1b", True), ("interleaved", True), ("hanayo", True), ("weipipe", True), ("gpipe", False),
                        ("zb-h1", False), ("zb-v", False), ("weipipe-zb", False), ("file", False)):  # fmt: skip
        staged = Layouts(pp=2, schedule=SCHEDULES.index(name))
        twice, once = (float(head_s(asked, staged, backward=True)) for asked in (plain, fused))
        assert twice / once == pytest.approx(3 / 2 if early else 1, rel=0.1), name
        # Logits that fit into one chunk are kept.
        few = replace(fused, sequence_length=512)
        once = float(head_s(few, replace(staged, pp=1), backward=True))
        assert float(head_s(few, staged, backward=True)) == once


def test_fused_parts_are_priced_like_compiled_ones() -> None:
    eager, some = own_stack("cuda", "none"), own_stack("cuda", "none", ("norm", "rope"))
    whole = own_stack("cuda", "none", ("norm", "glu", "rope", "loss"))
    assert eager.operators_forward > whole.operators_forward > some.operators_forward > PARTOOL.operators_forward
    assert own_stack("cuda", "block", ("norm",)).operators_forward == PARTOOL.operators_forward
    assert whole.logit_bytes < eager.logit_bytes

    def elementwise_s(fused: tuple[Fused, ...]) -> float:
        asked = job(stack=own_stack("cuda", "none", fused))
        return float(layer(asked, Layouts(compiled=0), kinds(LARGE)[0]).forward.elementwise_s)

    parts: tuple[Fused, ...] = ("norm", "glu", "rope")
    times = [elementwise_s(parts[:count]) for count in range(4)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 4

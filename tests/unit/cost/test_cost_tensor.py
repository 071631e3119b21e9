"""Cost of tensor parallelism: shares of the largest rank, collectives, bytes, and overlap with matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from _expected_traffic import tensor_calls
from layouts import laid, new_layout

from partool.cost import tensor_shares
from partool.cost.case import Layouts
from partool.cost.codec import encode
from partool.cost.kinds import kinds
from partool.cost.memory.activations import widths
from partool.cost.tensor_shares import share_columns, shares
from partool.cost.time.layer import layer
from partool.cost.time.pipeline import boundary_bytes
from partool.cost.time.tensor import embedding_seconds, head_seconds, layer_seconds
from partool.cost.training.bound import bound_s
from partool.cost.training.peak import predict_memory
from partool.cost.training.predict import predict_time
from partool.cost.training.tensor_sums import tensor_bytes
from partool.layout.parameters import count, groups
from partool.layout.tensor import head_ranges
from partool.plan.layout import Layout, Mesh
from partool.spec.experts import Moe
from partool.spec.hardware import Devices
from partool.spec.model import Mla, ModelConfig
from partool.work.stacks import PARTOOL, PARTOOL_CPU, PARTOOL_EAGER, STACKS, gathering_alone
from partool.work.training import TrainingWork

GPU = Devices(
    accelerator="h100-sxm", backend="cuda", per_node=8, nodes=4, memory_bytes=80 * 2**30, memory_bytes_per_s=3.35e12,
    achievable_flops=650e12, peak_flops=989e12, link_bytes_per_s=450e9, link_latency_s=5e-6, fabric_bytes_per_s=50e9,
    fabric_latency_s=10e-6, units=132,
)  # fmt: skip
ODD = ModelConfig(layers=3, hidden=30, ffn_hidden=17, heads=7, kv_heads=7, head_dim=6, vocab=101)
SHARED = ModelConfig(layers=2, hidden=32, ffn_hidden=48, heads=8, kv_heads=2, head_dim=4, vocab=64, qk_norm=True)
LARGE = ModelConfig(layers=8, hidden=8192, ffn_hidden=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256)


def job(model: ModelConfig = ODD, **changes: Any) -> TrainingWork:
    return replace(TrainingWork(model, GPU, 11, "fp64", global_batch=6), **changes)


def layout(model: ModelConfig = ODD, **changes: Any) -> Layout:
    tp = changes.pop("tp", 3)
    fields: dict[str, Any] = {
        "mesh": Mesh(tp=tp), "zero": 0, "micro_batch": 3, "accumulation": 2, "recompute": ("none",) * model.layers,
        "compile": "none", "stages": ((0, model.layers),),
    }  # fmt: skip
    return new_layout(**{**fields, **changes})


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 7), (28, 4), (5, 5), (24, 3), (8, 1), (12, 4)])
def test_heads_of_the_largest_rank_are_those_of_the_partition(heads: int, kv_heads: int) -> None:
    model = ODD.model_copy(update={"heads": heads, "kv_heads": kv_heads})
    ranks = np.arange(1, 20)
    queries, keys = tensor_shares.heads(model, ranks)
    for at, number in enumerate(ranks):
        dealt = head_ranges(heads, kv_heads, int(number))
        assert queries[at] == max(stop - start for start, stop in dealt.queries)
        assert keys[at] == max(stop - start for start, stop in dealt.keys)


def test_parameters_of_the_largest_rank() -> None:
    assert shares(ODD, None, 1, 1, False).layers[0].common == count(groups(ODD)[1])
    found = shares(ODD, None, 3, 1, False)
    # 3 of 7 heads, 6 of 17 inner widths, 34 of 101 tokens.
    assert found.layers[0].common == 4 * 3 * 6 * 30 + 3 * 6 * 30 + 2 * 30
    assert (found.embedding.common, found.head.common) == (34 * 30, 34 * 30 + 30)
    # Each of four ranks holds one of two key-value heads; gradients of head norms are summed over all four.
    held = shares(SHARED, None, 4, 1, False).layers[0]
    assert held.common == 2 * 8 * 32 + 2 * 4 * 32 + 3 * 12 * 32 + 2 * 32 + 2 * 4
    assert held.summed == 2 * 4 * 32 + 2 * 4
    # With norms on shares of the sequence, their gradients are summed too.
    assert shares(SHARED, None, 4, 1, True).layers[0].summed == held.summed + 2 * 32


def test_shares_of_many_layouts_are_those_of_each() -> None:
    tp, inner = np.array([1, 2, 4, 4, 2]), np.array([1, 1, 1, 2, 2])
    even = SHARED.model_copy(update={"kv_heads": 8})
    found = share_columns(job(even), Layouts(tp=tp, tensor_inner=inner))
    for at in range(len(tp)):
        one = shares(even, None, int(tp[at]), int(inner[at]), False)
        assert found.layers[0][0][at] == one.layers[0].common
        assert found.head[at] == one.head.common


def test_experts_are_whole_where_ranks_share_them() -> None:
    moe = SHARED.model_copy(update={"moe": Moe(experts=4, top_k=2, ffn_hidden=10)})
    whole = 4 * 3 * 10 * 32
    assert share_columns(job(moe), Layouts(tp=3)).layers[1][1] == 4 * 3 * 4 * 32
    assert share_columns(job(moe), Layouts(tp=3, ep=2)).layers[1][1] == whole / 2


def test_calls_by_hand() -> None:
    """Three layers of 33 tokens by 30, two micro-batches, 8 bytes: two sums per layer and pass, and the ends' sums."""
    whole = 33 * 30 * 8
    calls = tensor_calls(job(), layout(), [0])
    sums = {(call.kind, call.payload_bytes, call.ranks): 0 for call in calls}
    for call in calls:
        sums[call.kind, call.payload_bytes, call.ranks] += call.times
    expected = {whole: 2 * (3 * 4 + 1 + 1), 33 * 8: 2, 2 * 33 * 8: 2}
    assert sums == {("all_reduce", size, 3): times for size, times in expected.items()}
    assert tensor_bytes(job(), layout()) == sum(times * (4 * size // 3) for size, times in expected.items())


def test_calls_on_shares_of_the_sequence_by_hand() -> None:
    """Eleven tokens are four on each of three ranks; layers gather four times in backward, but not if it is split."""
    whole = 3 * 12 * 30 * 8
    shared = layout(sequence_norms=True)
    calls = [call for call in tensor_calls(job(), shared, [0]) if call.payload_bytes == whole]
    times = {kind: sum(call.times for call in calls if call.kind == kind) for kind in ("all_gather", "reduce_scatter")}
    assert times == {"all_gather": 2 * (3 * (2 + 4) + 1 + 1), "reduce_scatter": 2 * (3 * 4 + 1 + 1)}
    # Gradients of seven norms of width 30, once per step.
    (step,) = (call for call in tensor_calls(job(), shared, [0]) if call.times == 1)
    assert (step.kind, step.payload_bytes) == ("all_reduce", 7 * 30 * 8)
    halved = laid(shared, mesh=Mesh(pp=3, tp=3), schedule="zb-h1", stages=((0, 1), (1, 2), (2, 3)))
    inner = [call for call in tensor_calls(job(), halved, [1]) if call.kind == "all_gather"]
    assert sum(call.times for call in inner) == 2 * (2 + 2)


def test_recomputation_leaves_out_the_last_sum() -> None:
    once = tensor_calls(job(), layout(), [0])
    again = tensor_calls(job(), layout(recompute=("full", "none", "full")), [0])
    assert sum(call.times for call in again) - sum(call.times for call in once) == 2 * 2
    selective = tensor_calls(job(), layout(recompute=("selective",) * 3), [0])
    assert sum(call.sent_bytes for call in selective) == sum(call.sent_bytes for call in once)


def test_pieces_send_the_same() -> None:
    whole, pieces = (tensor_calls(job(), layout(tensor_chunks=number), [0]) for number in (1, 4))
    assert sum(c.payload_bytes * c.times for c in whole) == sum(c.payload_bytes * c.times for c in pieces)
    # 33 tokens in parts of nine: four calls in place of one.
    assert sum(c.times for c in pieces) - sum(c.times for c in whole) == 2 * 3 * 2 * 3


def test_gradients_of_shared_heads_are_summed_by_their_holders() -> None:
    """Each key-value head is held by two of four ranks; with sharded state they sum only the shard."""
    case = job(SHARED)
    (shared,) = (call for call in tensor_calls(case, layout(SHARED, tp=4), [0]) if call.ranks == 2)
    assert shared.payload_bytes == 8 * 2 * (2 * 4 * 32)
    sharded = layout(SHARED, mesh=Mesh(dp_shard=3, tp=4), zero=1, micro_batch=1)
    sizes = [
        sum(call.payload_bytes for call in tensor_calls(case, sharded, [0], shard=shard) if call.ranks == 2)
        for shard in range(3)
    ]
    # Four rows over three ranks: two, two, none.
    assert sizes == [8 * 2 * (2 * 2 * 32), 8 * 2 * (2 * 2 * 32), 0]
    frozen = tensor_calls(replace(case, frozen=("layers.*.attention.[kv].weight",)), layout(SHARED, tp=4), [0])
    assert not [call for call in frozen if call.ranks == 2]


def test_stages_hand_on_what_the_rank_holds() -> None:
    def handed(**changes: Any) -> int:
        return boundary_bytes(job(), layout(tp=changes.pop("tp", 3), **changes))

    assert handed() == 3 * 11 * 30 * 8
    assert handed(sequence_norms=True) == 3 * 4 * 30 * 8
    assert handed(tp=4, tensor_inner=2) == 3 * 11 * 15 * 8


def test_residual_stream_is_cut_by_shares_or_by_the_inner_ranks() -> None:
    case = job(LARGE)
    sizes = [widths(case, Layouts(tp=8, **form), 0).hidden for form in ({}, {"sequence_norms": 1}, {"tensor_inner": 2})]
    assert sizes == [8192, 1024, 4096]


def test_overlap_hides_what_products_take() -> None:
    case = job(LARGE, sequence_length=8192, precision="bf16", stack=PARTOOL_EAGER)
    kind = kinds(LARGE)[0]

    def shown(case: TrainingWork = case, **columns: Any) -> tuple[float, float]:
        found = layer(case, Layouts(tp=8, **{"compiled": 0, **columns}), kind)
        return tuple(float(one.exposed["tensor_parallel"]) for one in (found.forward, found.backward))  # type: ignore[return-value]

    plain, overlapped, pieces = shown(), shown(tensor_overlap=1), shown(tensor_chunks=4)
    sent = layer_seconds(case, Layouts(tp=8), kinds(case.model)[0])
    assert plain == pytest.approx((float(sent.forward.total), float(sent.backward.total)))
    assert overlapped[0] == plain[0]
    assert overlapped[1] < 0.5 * plain[1]
    assert pieces[0] < 0.7 * plain[0]
    assert pieces[1] == plain[1]
    assert shown(tensor_overlap=2) < plain
    # No overlap in compiled layers, in split backward passes, or on a CPU, whose cores do both.
    compiled = shown(compiled=1, tensor_overlap=1, tensor_chunks=4)
    assert compiled == pytest.approx(shown(compiled=1))
    assert shown(pp=2, schedule=3, tensor_overlap=1) == pytest.approx(plain)
    on_cores = replace(case, stack=PARTOOL_CPU)
    assert shown(on_cores, tensor_overlap=1) == pytest.approx(shown(on_cores))


def test_one_rank_sends_nothing() -> None:
    assert tensor_bytes(job(), layout(tp=1)) == 0
    assert tensor_calls(job(), layout(tp=1), [0]) == []
    assert float(layer_seconds(job(), Layouts(), kinds(ODD)[0]).forward.total) == 0.0


def test_uneven_ranks_are_priced_as_the_largest() -> None:
    """Seven heads over three ranks take as long as nine, and as much memory for attention."""
    nine = ODD.model_copy(update={"heads": 9, "kv_heads": 9, "ffn_hidden": 18, "vocab": 102})
    here, there = (predict_time(job(model), layout(model), 1) for model in (ODD, nine))
    assert here.step_time_s == pytest.approx(there.step_time_s, rel=1e-9)
    memory = [predict_memory(job(model), layout(model), 0.05).total_bytes for model in (ODD, nine)]
    assert memory[0] == memory[1]


def test_latent_attention_is_cut_by_heads() -> None:
    mla = Mla(q_rank=6, kv_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=4)
    model = ODD.model_copy(update={"mla": mla})
    assert widths(job(model), Layouts(tp=3), 0).query == 3 * 6
    assert widths(job(model), Layouts(tp=3), 0).latent == 2 * 6 + 2 * 4 + 2


@pytest.mark.parametrize("compile", ["none", "block"])
@pytest.mark.parametrize("form", [{}, {"sequence_norms": True}, {"tensor_inner": 2}, {"tensor_chunks": 2}])
def test_bounds_stay_below_the_prediction(form: dict[str, Any], compile: str) -> None:
    stack = PARTOOL if compile == "block" else PARTOOL_EAGER
    model = SHARED.model_copy(update={"kv_heads": 8, "layers": 4})
    case = job(model, stack=stack, precision="bf16", sequence_length=64)
    for pp in (1, 2):
        split = tuple((at * 4 // pp, (at + 1) * 4 // pp) for at in range(pp))
        one = layout(
            model, mesh=Mesh(pp=pp, tp=4), stages=split, compile=compile, tensor_overlap="backward", **form
        )  # fmt: skip
        exact = predict_time(case, one, 1)
        assert float(bound_s(case, encode(one))) <= exact.step_time_s * (1 + 1e-9)
        assert exact.traffic_bytes["tensor"] == tensor_bytes(case, one)


@pytest.mark.parametrize("norms", [0, 1])
def test_only_collectives_of_layers_are_sent_once_per_projection(norms: int) -> None:
    """Fourteen collectives in the place of eight; embedding and head have one input each, whatever gathers it."""
    alone = gathering_alone(STACKS["fsdp2"])
    together = replace(alone, tensor_exchanges=1.0)
    layouts = Layouts(tp=4, sequence_norms=norms, compiled=0)
    several, once = (job(LARGE, stack=stack, sequence_length=4096, precision="bf16") for stack in (alone, together))
    assert embedding_seconds(several, layouts) == embedding_seconds(once, layouts)
    assert head_seconds(several, layouts) == head_seconds(once, layouts)
    more, each = (layer_seconds(one, layouts, kinds(LARGE)[0]) for one in (several, once))
    assert more.forward.total == pytest.approx(1.75 * each.forward.total)
    assert more.backward.total == pytest.approx(1.75 * each.backward.total)
    assert more.recompute_s == pytest.approx(1.75 * each.recompute_s)

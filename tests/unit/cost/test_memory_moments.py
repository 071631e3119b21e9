"""What ranks hold together at the moments of a step, of schedules whose ranks do not hold all of it at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from layouts import new_layout

from partool.cost.case import SCHEDULES, SELECTIVE, Layouts
from partool.cost.codec import encode
from partool.cost.memory import activations, expert_backward
from partool.cost.memory.activations import NONE, saved_by_layer
from partool.cost.memory.backward import BackwardBytes, dense_backward
from partool.cost.memory.in_flight import handed_over
from partool.cost.memory.in_flight import in_flight as closed
from partool.cost.memory.layout_ranks import loads_of_layout
from partool.cost.memory.stacks import memory_stack
from partool.cost.training.moments import Moment
from partool.cost.training.pass_bytes import PassBytes, bytes_of_layers, pass_bytes
from partool.cost.training.peak import rank_moments
from partool.cost.training.runtime_moments import _later
from partool.cost.training.states import states
from partool.plan.layout import Layout, Mesh
from partool.schedule import Action, begun_by_ranks, check
from partool.schedule.begun import Begun, moments_of
from partool.spec.experts import Moe
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.work.stacks import STACKS
from partool.work.training import TrainingWork

GPU = Devices(
    accelerator="test", backend="cuda", nodes=1, per_node=8, memory_bytes=80 * 2**30, peak_flops=1e15,
    achievable_flops=8e14, memory_bytes_per_s=2e12, link_bytes_per_s=4e11, fabric_bytes_per_s=5e10,
)  # fmt: skip
CPU = GPU.model_copy(update={"backend": "cpu"})
LLAMA = ModelConfig(layers=8, hidden=512, ffn_hidden=1536, heads=8, kv_heads=2, head_dim=64, vocab=4096)


def job(precision: Any = "bf16", model: ModelConfig = LLAMA, devices: Devices = GPU) -> TrainingWork:
    return TrainingWork(model, devices, 1024, precision, STACKS["partool"], global_batch=64)


def pipelined(schedule: str, *, ranks: int, chunks: int, micro_batches: int) -> Layout:
    stages = ranks * chunks
    bounds = tuple((8 * stage // stages, 8 * (stage + 1) // stages) for stage in range(stages))
    return new_layout(
        mesh=Mesh(pp=ranks), zero=0, micro_batch=1, accumulation=micro_batches, recompute=("none",) * 8,
        compile="none", stages=bounds, schedule=schedule, chunks=chunks,
    )  # fmt: skip


def passes_of(layout: Layout) -> PassBytes:
    case, layouts, stack = job(), encode(layout), memory_stack("partool")
    loads = loads_of_layout(case, layout)
    return pass_bytes(case, layouts, stack, loads, bytes_of_layers(case, layouts, stack, [loads]))


def actions(text: str) -> list[Action]:
    """Return the actions of a list such as ``F0.1 B0.1``: kind, stage, micro-batch."""
    parts = ((each[0], each[1:].split(".")) for each in text.split())
    return [Action(kind, int(stage), int(batch)) for kind, (stage, batch) in parts]


def test_moments_by_the_stages_that_have_gradients() -> None:
    found = moments_of(actions("F0.0 F1.0 B1.0 F0.1 F1.1 B0.0 B1.1 B0.1"), {0}, 1)
    assert found == [Begun(0, 2, 1, 1), Begun(1, 3, 2, 1), Begun(2, 2, 1, 1)]


def test_gradients_of_a_split_pass_begin_with_those_of_weights() -> None:
    found = moments_of(actions("F0.0 F0.1 I0.0 F0.2 W0.0"), (), 0)
    assert found == [Begun(0, 3, 0, 3), Begun(1, 2, 0, 2)]


def test_the_last_moment_is_that_of_the_whole_list() -> None:
    """Lists of few rounds stand for long ones."""
    few, many = (begun_by_ranks("hanayo", 2, count, 2, 0) for count in (8, 64))
    assert [each[:-1] for each in few] == [each[:-1] for each in many]
    assert all(one[-1].activations <= other[-1].activations for one, other in zip(few, many, strict=True))


def test_most_activations_of_waves_exist_before_most_gradients() -> None:
    """With one micro-batch per rank, the last stages' backward passes end before the first ones' begin.

    The last rank holds eight activations without gradients, seven when one of its two stages has gradients, and at
    most six with those of both.
    """
    layout = pipelined("hanayo", ranks=4, chunks=2, micro_batches=4)
    assert begun_by_ranks("hanayo", 4, 4, 2, 0)[3] == (Begun(0, 8, 4, 0), Begun(1, 7, 3, 0), Begun(2, 6, 3, 0))
    found, one = rank_moments(job(), layout), float(passes_of(layout).of_layer[3])  # type: ignore[index]
    for moments in found:
        most, gradients = (max(getattr(each, name) for each in moments) for name in ("activations", "gradients"))
        full = [each for each in moments if each.activations > 0.9 * most]
        assert max(each.gradients for each in full) <= 0.55 * gradients
    losses = [each for each in found[3] if each.name == "loss"]
    assert np.allclose([each.gradients for each in losses], np.array([0.0, 0.5, 1.0]) * losses[-1].gradients)
    assert np.allclose([losses[0].activations - each.activations for each in losses[1:]], [one, 2 * one])


@pytest.mark.parametrize(("name", "chunks"), [("hanayo", 2), ("hanayo", 4), ("zb-v", 2)])
def test_bounds_of_micro_batches_in_flight_with_all_gradients(name: str, chunks: int) -> None:
    """The search skips layouts by the closed form: no rank at either end holds less when all gradients exist."""
    for ranks, micro_batches in itertools.product((2, 3, 4), (2, 3, 5, 8)):
        if check(name, ranks, micro_batches, chunks) is not None:
            continue
        columns = Layouts(
            pp=ranks, accumulation=micro_batches, chunks=chunks, schedule=SCHEDULES.index(name)
        )  # fmt: skip
        ends = np.array([0, ranks - 1])
        bound = _later(columns, closed(columns, ends) / chunks) * chunks + 0 * ends
        exact = begun_by_ranks(name, ranks, micro_batches, chunks, 0)
        assert all(bound[at] <= exact[rank][-1].activations for at, rank in enumerate(ends)), (ranks, micro_batches)


def test_waves_turn_round_without_messages() -> None:
    """The ranks at both ends run two stages in succession; the first one has the model's input, too."""
    layout = pipelined("hanayo", ranks=4, chunks=2, micro_batches=4)
    passes = passes_of(layout)
    assert (np.asarray(passes.inputs) / passes.stream).tolist() == [1, 6, 8, 4]
    columns, ranks = encode(layout), np.arange(4)
    activations = np.asarray(closed(columns, ranks))
    assert (activations - handed_over(columns, ranks, activations))[[0, 3]].tolist() == [1, 4]


def test_stages_in_one_direction_keep_their_messages() -> None:
    columns = Layouts(pp=4, accumulation=8, chunks=2, schedule=SCHEDULES.index("interleaved"))
    inputs = handed_over(columns, np.arange(4), np.array([11, 9, 7, 5]))
    assert inputs.tolist() == [7, 0, 0, 0]


@pytest.mark.parametrize(("micro_batches", "logits"), [(4, 4), (8, 2)])
def test_the_loss_counts_the_micro_batches_of_the_last_stage(micro_batches: int, logits: int) -> None:
    """Of the eight activations on the first rank of ZB-V, few are the last stage's once the pipeline is full."""
    found = passes_of(pipelined("zb-v", ranks=4, chunks=2, micro_batches=micro_batches))
    assert float(np.asarray(found.in_flight)[0]) == 4
    each = 1024 * LLAMA.vocab * 4
    assert float(np.asarray(found.loss)[0]) == (logits + 1) * each  # the log-softmax, and what it is made of


def test_the_loss_of_later_micro_batches_is_as_large_where_the_last_stage_holds_one() -> None:
    """Of interleaved stages the others hold fewer micro-batches once all gradients exist, the last one still one."""
    moments = rank_moments(job(), pipelined("interleaved", ranks=2, chunks=2, micro_batches=2))[1]
    first, later = (each for each in moments if each.name == "loss")
    assert later.activations < first.activations
    assert later.loss == first.loss > 0


def test_ranks_that_pass_weights_on_hold_their_own_stages_and_no_messages_of_fsdp() -> None:
    case, layout = job("fp32"), pipelined("weipipe", ranks=2, chunks=1, micro_batches=4)
    ring = loads_of_layout(case, layout).ring
    assert ring is not None
    stage = 4 * float(ring.elements)
    copies = (np.asarray(ring.weights) + ring.gradients) * stage
    for rank, moments in enumerate(rank_moments(case, layout)):
        assert {each.gathered for each in moments} == {stage}
        assert {each.communication for each in moments} == {copies[rank]}
    loads = loads_of_layout(case, layout)
    assert not np.any(states(case, encode(layout), memory_stack("partool"), loads).buffers)


def test_the_head_of_ranks_that_pass_weights_on_is_cast_for_the_loss() -> None:
    """What the final norm keeps is gone when the backward passes of layers run."""
    layout = pipelined("weipipe", ranks=2, chunks=1, micro_batches=4)
    moments, passes = {each.name: each for each in rank_moments(job(), layout)[0]}, passes_of(layout)
    stage = moments["first layer"].gathered
    assert moments["loss"].gathered - stage == 2 * (512 * LLAMA.vocab + 512)
    saved = moments["first layer"].activations - moments["first layer"].working
    assert moments["loss, backward"].activations - saved == np.asarray(passes.of_norm).flat[0] > 0


def test_recomputed_keys_are_copied_again() -> None:
    """Off the CPU, kernels for wide types take as many key heads as query heads: attention's inputs are copies."""

    def saved(devices: Devices, policy: int) -> float:
        return float(saved_by_layer(job("fp32", devices=devices), Layouts(), memory_stack("partool"), 0, policy))

    assert saved(GPU, SELECTIVE) == saved(CPU, SELECTIVE)
    assert saved(GPU, NONE) - saved(CPU, NONE) == 1024 * 4 * 2 * (512 - 128)


def test_a_router_copies_narrow_tokens_only() -> None:
    """It works in float32: its scores have four bytes, and rows of tokens those of the precision."""
    model = LLAMA.model_copy(update={"moe": Moe(experts=8, top_k=2, ffn_hidden=256, aux_loss=0.0)})

    def routed(precision: str) -> float:
        return float(activations._routed(job(precision, model), Layouts(), NONE))

    assert routed("fp32") == 4 * 512 * 4 + 4 * 8
    assert routed("bf16") == 2 * 512 * 3 + 4 * 8 + 4 * 512


def test_a_norms_result_is_kept_for_shared_experts_only() -> None:
    def routed(shared: int) -> float:
        model = LLAMA.model_copy(update={"moe": Moe(experts=8, top_k=2, ffn_hidden=256, shared_experts=shared)})
        return float(activations._routed(job("bf16", model), Layouts(), NONE))

    assert routed(1) - routed(0) == 2 * 512


EXPERTS = LLAMA.model_copy(update={"moe": Moe(experts=16, top_k=2, ffn_hidden=256)})


def moments_of_experts(**changes: Any) -> dict[str, Moment]:
    """Return the moments of a layout in which 4 of 8 ranks share experts."""
    values: dict[str, Any] = {
        "mesh": Mesh(dp_shard=8), "zero": 3, "micro_batch": 1, "accumulation": 1, "recompute": ("full",) * 8,
        "compile": "none", "stages": ((0, 8),), "schedule": "1f1b", "chunks": 1, "expert": 4,
    }  # fmt: skip
    (found,) = rank_moments(job("bf16", EXPERTS), new_layout(**(values | changes)))
    return {moment.name: moment for moment in found if moment.occurs}


def test_experts_that_ranks_share_are_reduced_within_their_layer() -> None:
    """4 of 16 experts of 3 matrices are on a rank, and 2 ranks share each; 8 ranks share the rest of the layer."""
    moments = moments_of_experts()
    experts, rest = 4 * 3 * 512 * 256, 512 * (512 + 128 + 128 + 512) + 2 * 512 + 16 * 512
    root, embedding = 512 * LLAMA.vocab + 512, 512 * LLAMA.vocab
    first, reduced = moments["first layer"], moments["first layer, experts reduced"]
    assert first.gathered == 2 * (root + rest + experts)
    assert reduced.gathered == 2 * (root + rest)
    assert first.communication == 2 * embedding + 4 * rest
    assert reduced.communication == 2 * embedding + 4 * experts
    after = moments["first layer, after experts"]
    assert after.gradients - first.gradients == 4 * experts / 2
    assert moments["second layer"].gradients == first.gradients - 4 * (experts / 2 + rest / 8)
    assert moments["second layer"].communication == 2 * rest + 4 * rest


def test_gradients_that_one_rank_has_whole_are_divided_into_a_copy() -> None:
    """Two copies of the state, in each of which every expert is on one of four ranks."""
    apart = moments_of_experts(mesh=Mesh(dp_replicate=2, dp_shard=4))["first layer, experts reduced"]
    experts, embedding = 4 * 3 * 512 * 256, 512 * LLAMA.vocab
    assert apart.communication == 2 * embedding + 4 * experts + 4 * experts
    assert apart.communication - moments_of_experts()["first layer, experts reduced"].communication == 4 * experts


def test_the_first_layers_gradients_are_divided_when_all_others_exist() -> None:
    """With ZeRO-0, each of 8 ranks has all gradients, in float32; the buffer and the copy have the layer's."""
    moments = moments_of_experts(zero=0, expert=1, mesh=Mesh(dp_replicate=8))
    layer = 16 * 3 * 512 * 256 + 512 * (512 + 128 + 128 + 512) + 2 * 512 + 16 * 512
    reduced = moments["first layer, reduced"]
    assert reduced.communication == 4 * layer + 4 * layer
    assert reduced.gradients == 4 * 8 * layer
    assert "first layer, reduced" not in moments_of_experts()


def exchanging(monkeypatch: pytest.MonkeyPatch, size: float) -> BackwardBytes:
    """Return what a layer with experts takes if the buffers of exchanges of attention have ``size`` bytes."""
    monkeypatch.setattr(expert_backward, "attention_exchange_bytes", lambda job, layouts: size)
    layouts = Layouts(ep=np.array([4]), shards=np.array([8]))
    found = expert_backward.experts_backward(job("bf16", EXPERTS), layouts, np.array([2.0**26]))
    assert found is not None
    return found


def test_attention_of_layers_with_experts_has_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come after the experts, when attention's gradients exist."""
    large, larger = (exchanging(monkeypatch, size) for size in (2.0**30, 2.0**31))
    assert larger.after_experts_bytes - large.after_experts_bytes == 2.0**30
    assert larger.backward_peak_bytes == large.backward_peak_bytes


def test_dense_layers_hold_no_rows_of_experts() -> None:
    model = EXPERTS.model_copy(update={"moe": Moe(experts=16, top_k=16, ffn_hidden=256, every=2)})

    def dense(ep: int) -> float:
        layouts = Layouts(ep=np.array([ep]), shards=np.array([8]))
        found = dense_backward(job("bf16", model), layouts, np.array([2.0**24]))
        assert found is not None
        return float(np.asarray(found.backward_peak_bytes).flat[0])

    assert dense(8) == dense(1)


def test_experts_that_nobody_shares_are_reduced_with_their_layer() -> None:
    moments = moments_of_experts(expert=1)
    assert not any("experts" in name for name in moments)
    experts, rest = 16 * 3 * 512 * 256, 512 * (512 + 128 + 128 + 512) + 2 * 512 + 16 * 512
    assert moments["second layer"].communication == (2 + 4) * (experts + rest)


def test_dense_layers_before_those_with_experts_are_the_larger_units() -> None:
    assert EXPERTS.moe is not None
    moe = EXPERTS.moe.model_copy(update={"first_dense_layers": 2})
    model = EXPERTS.model_copy(update={"moe": moe, "ffn_hidden": 1024})
    layout = new_layout(
        mesh=Mesh(dp_shard=8), zero=3, micro_batch=1, accumulation=1, recompute=("full",) * 8, compile="none",
        stages=((0, 8),), schedule="1f1b", chunks=1, expert=4,
    )  # fmt: skip
    moments = {moment.name: moment for moment in rank_moments(job("bf16", model), layout)[0]}
    attention = 512 * (512 + 128 + 128 + 512) + 2 * 512
    dense, rest = attention + 3 * 512 * 1024, attention + 16 * 512
    assert moments["last layer but one"].communication == 2 * rest + 4 * rest
    assert moments["first layer"].communication == 2 * 512 * LLAMA.vocab + 4 * dense

"""Muon: its steps against torch's, the quintic on singular values, owners of matrices, and the planner's figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import laid
from planned import plan_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from partool.cost.codec import encode
from partool.cost.training.optimizer import matrices_s, matrix_bytes, working_bytes
from partool.cost.training.peak import rank_memories
from partool.cost.training.predict import predict_time
from partool.engines.write import terms_of
from partool.layout.matrices import MatrixStack, matrix_stacks, newton_schulz_flops
from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import job_of_plan
from partool.spec import load_text
from partool.spec.model import ModelConfig
from partool.spec.training import OptimizerSpec
from partool.work.training import MatrixUpdates, TrainingWork
from partool_runtime.optim import owners
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.muon import COEFFICIENTS, WholeMatrices, orthogonalised, scaled_rate
from partool_runtime.optim.owners import Holders, rounds, shared_out
from partool_runtime.weights import build, freeze

SHAPES = {"layers.0.wide": (9, 31), "layers.0.tall": (33, 8), "layers.1.square": (16, 16)}
OTHERS = {"embed.weight": (11, 8), "norm": (8,)}
LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1


def spec_of(**fields: Any) -> OptimizerSpec:
    settings = {"name": "muon", "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return OptimizerSpec.model_validate(settings | fields)


def tensors(seed: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def stacks_of(shapes: dict[str, tuple[int, ...]], count: int = 1) -> list[MatrixStack]:
    return [MatrixStack(name, count, shape[0] // count, shape[1]) for name, shape in shapes.items()]


def optimizer_of(named: dict[str, nn.Parameter], spec: OptimizerSpec, count: int = 1) -> DeviceOptimizer:
    matrices = stacks_of({name: SHAPES[name] for name in named if name in SHAPES}, count)
    return DeviceOptimizer(named, spec, matrices=WholeMatrices(matrices, spec.newton_schulz))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_are_those_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    ours, theirs = ({n: nn.Parameter(t) for n, t in tensors(0, SHAPES, dtype).items()} for _ in range(2))
    assert spec_of().newton_schulz == "bf16"
    optimizer = optimizer_of(ours, spec_of())
    reference = torch.optim.Muon(
        list(theirs.values()), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        for name, gradient in tensors(1 + step, SHAPES, dtype).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(LR)
        reference.step()
        for name, parameter in theirs.items():
            assert torch.equal(ours[name], parameter), (step, name)
            assert torch.equal(optimizer.state()[f"momentum.{name}"], reference.state[parameter]["momentum_buffer"])
    assert not torch.equal(ours["layers.0.wide"], tensors(0, SHAPES, dtype)["layers.0.wide"])


def test_all_other_parameters_step_by_adamw() -> None:
    shapes = SHAPES | OTHERS
    start = tensors(0, shapes, torch.float64)
    ours, plain = ({name: nn.Parameter(tensor.clone()) for name, tensor in start.items()} for _ in range(2))
    optimizer, adamw = optimizer_of(ours, spec_of()), DeviceOptimizer(plain, spec_of(name="adamw"))
    moments = {(kind, name) for kind, _, name in (key.partition(".") for key in optimizer.state())}
    assert moments == {("momentum", name) for name in SHAPES} | set(product(("exp_avg", "exp_avg_sq"), OTHERS))
    for step in range(3):
        for name, gradient in tensors(1 + step, shapes, torch.float64).items():
            ours[name].grad, plain[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(LR, 0.5)
        adamw.step(LR, 0.5)
    assert [name for name in shapes if torch.equal(ours[name], plain[name])] == list(OTHERS)


def quintic(value: float) -> float:
    a, b, c = COEFFICIENTS
    for _ in range(5):
        value = a * value + b * value**3 + c * value**5
    return value


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 23), columns=st.integers(1, 23), seed=st.integers(0, 99))
def test_the_result_is_the_quintic_of_the_singular_values(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    mapped = torch.tensor([quintic(float(value / values.norm())) for value in values], dtype=torch.float64)
    expected = left @ torch.diag(mapped) @ right
    assert float((orthogonalised(matrix.clone()) - expected).abs().max()) < 1e-10


def test_a_matrix_without_a_direction_is_not_moved() -> None:
    assert not orthogonalised(torch.zeros(3, 5)).any()


def test_experts_are_orthogonalised_one_by_one() -> None:
    shape = {"layers.1.square": SHAPES["layers.1.square"]}
    stacked = {name: nn.Parameter(tensor) for name, tensor in tensors(0, shape, torch.float64).items()}
    halves = [stacked["layers.1.square"].detach()[rows].clone() for rows in (slice(0, 8), slice(8, 16))]
    gradient = tensors(1, shape, torch.float64)["layers.1.square"]
    stacked["layers.1.square"].grad = gradient.clone()
    spec = spec_of(newton_schulz="working", momentum=0.0)
    optimizer_of(stacked, spec, count=2).step(LR)
    for half, rows in zip(halves, (slice(0, 8), slice(8, 16)), strict=True):
        half.mul_(1.0 - LR * DECAY).add_(orthogonalised(gradient[rows].clone()), alpha=-scaled_rate(LR, 8, 16))
        assert torch.equal(stacked["layers.1.square"].detach()[rows], half)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    ranks=st.integers(1, 9),
)
def test_owners_share_all_matrices_evenly(shapes: list[tuple[int, int, int]], ranks: int) -> None:
    stacks = [MatrixStack(f"layers.{at}", *shape) for at, shape in enumerate(shapes)]
    found = shared_out(stacks, ranks)
    assert Counter(matrix for mine in found for matrix in mine) == {
        (stack, number): 1 for stack in stacks for number in range(stack.count)
    }
    work = [sum(newton_schulz_flops(one.stack.rows, one.stack.columns) for one in mine) for mine in found]
    largest = max(newton_schulz_flops(stack.rows, stack.columns) for stack in stacks)
    assert max(work) <= sum(work) / ranks + largest


EXPERTS = "moe: {experts: 4, top_k: 2, ffn_hidden: 32, shared_experts: 1, first_dense_layers: 1}"
SPEC = """
model: {layers: 3, hidden: 64, ffn_hidden: 192, heads: 4, vocab: 256}
hardware: {accelerator: h100-sxm, per_node: 4}
training: {sequence_length: 64, global_batch: 16}
optimizer: {name: muon, momentum: 0.95}
data: python-stdlib
parallel: {data: {zero: 1}, tensor: 1, pipeline: 1, compile: none}
"""


@cache
def planned() -> Plan:
    """Return a plan of four data-parallel ranks."""
    return plan_of(SPEC)


def job_of(model: str, **fields: Any) -> TrainingWork:
    """Return the job of that plan with another model."""
    plan = planned()
    config = ModelConfig.model_validate(dict(plan.model) | yaml.safe_load(f"{{{model}}}"))
    return replace(job_of_plan(plan, plan.devices), model=config, **fields)


@pytest.mark.parametrize("model", ["ffn_bias: true", EXPERTS])
@pytest.mark.parametrize("frozen", [(), ("layers.0.*", "*.o.weight")])
def test_the_planner_counts_the_bytes_of_the_state(model: str, frozen: tuple[str, ...]) -> None:
    job = job_of(model, frozen=frozen)
    decoder = build(job.model)
    freeze(decoder, frozen)
    stacks = matrix_stacks(job.model, frozen)
    named = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    held = DeviceOptimizer(named, planned().optimizer, matrices=WholeMatrices(stacks, "bf16")).state_bytes()
    both = sum(p.numel() for p in named.values())
    assert held == 4 * (2 * both - sum(stack.elements for stack in stacks)) < 4 * 2 * both
    for zero, shards in ((0, 1), (1, 4), (3, 4)):
        terms = rank_memories(job, laid(planned().layout, zero=zero))[0].terms
        assert terms["optimizer"] == pytest.approx(held / shards, abs=8 * 4)


def test_flops_are_those_of_the_products() -> None:
    assert newton_schulz_flops(2, 3) == newton_schulz_flops(3, 2) == 320
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.randn(24, 56))
    assert counter.get_total_flops() == newton_schulz_flops(24, 56)


def test_ranks_share_the_work_and_all_else_costs_nothing_more() -> None:
    job = job_of("hidden: 4096, ffn_hidden: 16384, heads: 32, kv_heads: 32, head_dim: 128")
    layout = encode(planned().layout)
    one = replace(layout, shards=1)
    rate = job.devices.achievable_flops * job.devices.sustained_share
    flops = sum(stack.count * newton_schulz_flops(stack.rows, stack.columns) for stack in matrix_stacks(job.model))
    alone_s, shared_s = float(matrices_s(job, one)), float(matrices_s(job, layout))
    # The sustained rate is the median large product's; products of these sizes were measured faster than that one.
    assert flops / job.devices.achievable_flops < alone_s <= 1.5 * flops / rate
    assert alone_s / 4 < shared_s < alone_s
    plain = replace(job, matrices=None)
    assert (matrices_s(plain, layout), matrix_bytes(plain, layout), working_bytes(plain, layout)) == (0.0, 0.0, 0.0)
    wide = replace(job, matrices=MatrixUpdates(1, 4))
    assert float(matrices_s(wide, one)) > 10 * alone_s
    assert matrix_bytes(wide, layout) == 2 * matrix_bytes(job, layout)
    costs = {name: predict_time(each, planned().layout, 1) for name, each in (("muon", job), ("adamw", plain))}
    terms_s = {name: cost.terms_s["optimizer"] for name, cost in costs.items()}
    assert terms_s["muon"] > terms_s["adamw"] + 0.8 * shared_s
    assert costs["muon"].traffic_bytes["optimizer"] == int(matrix_bytes(job, layout))
    assert costs["adamw"].traffic_bytes["optimizer"] == 0


MESHES = {
    "one copy": ({"zero": 3, "mesh": Mesh(dp_shard=4)}, False),
    "two copies": ({"zero": 1, "mesh": Mesh(dp_replicate=2, dp_shard=2)}, False),
    "no shards": ({"zero": 0, "mesh": Mesh(dp_shard=3)}, False),
    "tensor ranks": ({"zero": 1, "mesh": Mesh(dp_shard=2, tp=3)}, False),
    "experts": ({"zero": 2, "mesh": Mesh(dp_shard=4), "expert": 2}, True),
    "parts of experts": ({"zero": 1, "mesh": Mesh(dp_shard=2, tp=4), "expert": 2, "expert_tensor": 2}, True),
}


def exchanged(name: str) -> None:
    """Raise AssertionError if the rounds of all ranks do not gather and return each matrix exactly."""
    fields, experts = MESHES[name]
    model = job_of(f"hidden: 20, heads: 5, kv_heads: 1, head_dim: 7, ffn_hidden: 37, {EXPERTS * experts}").model
    layout = laid(planned().layout, **fields)
    rows = own_partition(model, layout.mesh.tp, 1, False, layout.expert)
    plan = planned().model_copy(update={"model": model, "layout": layout, "partition": rows})
    stacks = matrix_stacks(model)
    holders = Holders(plan, [stack.name for stack in stacks])
    wholes = {one.name: torch.arange(one.elements).view(-1, one.columns) for one in stacks}
    shards: list[dict[str, torch.Tensor]] = []
    for place in range(holders.size):
        shards.append({})
        for stack in stacks:
            placement, held = holders.part(stack, place)
            shards[-1][stack.name] = torch.full((len(held), *placement.local_shape[1:]), -1)
            for box in placement.boxes(held):
                inside = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                shards[-1][stack.name][box.local] = wholes[stack.name][inside]
    back = [{name: torch.full_like(shard, -2) for name, shard in each.items()} for each in shards]
    for made in zip(*(rounds(stacks, holders, place) for place in range(holders.size)), strict=True):
        for owner, mine in enumerate(made):
            if mine.mine is None:
                continue
            stack, number = mine.mine
            matrix = torch.full((stack.rows, stack.columns), -3)
            for place, theirs in enumerate(made):
                for (held_name, sent), got in zip(theirs.sent[owner], mine.received[place], strict=True):
                    assert (matrix[got.inside] == -3).all(), "sent twice"
                    matrix[got.inside] = shards[place][held_name][sent.local]
            assert torch.equal(matrix, wholes[stack.name][number * stack.rows : (number + 1) * stack.rows])
            for place, theirs in enumerate(made):
                for (held_name, taken), result in zip(theirs.taken[owner], mine.returned[place], strict=True):
                    back[place][held_name][taken.local] = matrix[result.inside]
    for shard, got_back in zip(shards, back, strict=True):
        assert all(torch.equal(shard[name], got_back[name]) for name in shard)


@pytest.mark.parametrize("name", list(MESHES))
def test_every_matrix_comes_whole_to_its_owner_and_back(name: str) -> None:
    exchanged(name)


def test_a_wrong_cut_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def evenly(rows: range, rank: int, ranks: int) -> range:
        return rows[len(rows) * rank // ranks + (rank == 1) : len(rows) * (rank + 1) // ranks]

    monkeypatch.setattr(owners, "split_rows", evenly)
    with pytest.raises(AssertionError):
        exchanged("one copy")


@pytest.mark.parametrize(
    ("overrides", "code", "path"),
    [
        (("parallel.offload.optimizer=cpu",), "PT224", ("parallel", "offload", "optimizer")),
        (("optimizer.name=sgd", "optimizer.newton_schulz=working"), "PT226", ("optimizer", "newton_schulz")),
        (("model={hf: ./folder}",), "PT241", ("optimizer", "name")),
    ],
)
def test_findings(overrides: tuple[str, ...], code: str, path: tuple[str, ...]) -> None:
    found = load_text(SPEC, overrides=list(overrides)).diagnostics
    assert [(each.code, each.path) for each in found if each.severity == "error"] == [(code, path)]


@pytest.mark.parametrize("engine", ["deepspeed", "accelerate", "torchtitan", "megatron"])
def test_other_systems_are_not_told_of_it(engine: str) -> None:
    plan = planned().model_copy(update={"spec": planned().spec | {"engine": engine}})
    assert plan.engine == engine
    assert ("PT828", ("optimizer", "name")) in {(each.code, each.path) for each in terms_of(plan).findings}

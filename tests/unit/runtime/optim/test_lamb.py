"""LAMB: its steps against the paper's formula, the matrices that have norms, and the planner's figures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from layouts import laid
from planned import plan_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partool.cost.codec import encode
from partool.cost.training import optimizer as costs
from partool.cost.training.peak import rank_memories
from partool.cost.training.predict import predict_time
from partool.engines.write import terms_of
from partool.layout.matrices import scaled_matrices
from partool.plan.layout import Mesh
from partool.plan.types import HfModel, Plan
from partool.planner.elastic import job_of_plan
from partool.spec import load_text
from partool.spec.model import ModelConfig
from partool.spec.training import OptimizerSpec
from partool.work.training import TrainingWork
from partool_runtime.model.decoder import AnyDecoder
from partool_runtime.optim import steps
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.lamb import ratios
from partool_runtime.optim.whole_norms import matrix_counts, rows_of_matrices
from partool_runtime.placement import Placement
from partool_runtime.weights import build, freeze

SHAPES = {"embed.weight": (7, 3), "w": (5, 4), "zeros": (3, 2), "still": (2, 3), "norm": (5,), "none": (0, 3)}
LR, BETAS, EPS, DECAY, SCALE, STEPS = 0.05, (0.8, 0.9), 1e-9, 0.2, 0.5, 5
GROUPS = {"embed.*": {"lr_factor": 0.25, "betas": [0.5, 0.6]}, "still": {"weight_decay": 0.0}}


def spec_of(**fields: Any) -> OptimizerSpec:
    settings = {"name": "lamb", "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "groups": GROUPS}
    return OptimizerSpec.model_validate(settings | fields)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draws, dtype=torch.float64) for name, shape in SHAPES.items()}


def begun() -> dict[str, torch.Tensor]:
    """Return weights, of which those of ``zeros`` have no norm."""
    return {name: torch.zeros_like(value) if name == "zeros" else value for name, value in tensors(0).items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Return gradients of a step; ``still`` has none, so that its direction has no norm."""
    return {name: value for name, value in tensors(step).items() if name != "still"}


def by_the_paper(spec: OptimizerSpec) -> dict[str, torch.Tensor]:
    """Return the weights after all steps, by algorithm 2 of arXiv 1904.00962."""
    weights = begun()
    first, second = ({name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    for step, name in product(range(1, STEPS + 1), SHAPES):
        gradient = SCALE * gradients(step).get(name, torch.zeros_like(weights[name]))
        beta1, beta2 = (0.5, 0.6) if name == "embed.weight" else BETAS
        lr = LR * (0.25 if name == "embed.weight" else 1.0)
        decay = spec.weight_decay if weights[name].ndim > 1 and name != "still" else 0.0
        first[name] = beta1 * first[name] + (1 - beta1) * gradient
        second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
        move = first[name] / (1 - beta1**step) / ((second[name] / (1 - beta2**step)).sqrt() + EPS)
        move = move + decay * weights[name]
        size, length, ratio = float(weights[name].norm()), float(move.norm()), 1.0
        if size > 0 and length > 0 and (spec.adapt == "all" or weights[name].ndim > 1):
            low, high = spec.norm_bounds or (0.0, float("inf"))
            ratio = min(max(size, low), high) / length
        weights[name] = weights[name] - lr * ratio * move
    return weights


def stepped(spec: OptimizerSpec, dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    named = {name: nn.Parameter(value.to(dtype)) for name, value in begun().items()}
    optimizer = DeviceOptimizer(named, spec)
    for step in range(1, STEPS + 1):
        optimizer.begin(LR, SCALE)
        for name, gradient in gradients(step).items():
            named[name].grad = gradient.to(dtype)
        optimizer.step(LR, SCALE)
    return named


@pytest.mark.parametrize("fields", [{}, {"adapt": "all"}, {"norm_bounds": [0.5, 2.0]}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("piece", [2**24, 6])
def test_steps_are_those_of_the_paper(fields: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PIECE_ELEMENTS", piece)
    expected = by_the_paper(spec_of(**fields))
    for name, weight in stepped(spec_of(**fields)).items():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-13, atol=1e-13)
        assert torch.equal(weight, begun()[name]) == (name in ("still", "none")), name


def test_settings_change_the_steps() -> None:
    plain = stepped(spec_of())
    for fields, changed in (
        ({"adapt": "all"}, {"norm"}),
        ({"norm_bounds": [0.5, 2.0]}, {"embed.weight", "w", "zeros"}),
    ):
        other = stepped(spec_of(**fields))
        assert {name for name in plain if not torch.equal(plain[name], other[name])} == changed


def test_float32_keeps_its_digits() -> None:
    expected = by_the_paper(spec_of())
    for name, weight in stepped(spec_of(), torch.float32).items():
        torch.testing.assert_close(weight.detach().double(), expected[name], rtol=2e-5, atol=2e-6)


def test_ratios() -> None:
    weights, moves = torch.tensor([16.0, 0.0, 4.0, 0.0, 64.0]), torch.tensor([4.0, 4.0, 0.0, 0.0, 1.0])
    assert ratios(weights, moves).tolist() == [2.0, 1.0, 1.0, 1.0, 8.0]
    assert ratios(weights, moves, [4.5, 6.0]).tolist() == [2.25, 1.0, 1.0, 1.0, 6.0]


@given(
    count=st.integers(1, 5), each=st.integers(1, 6), cut=st.integers(1, 4), part=st.integers(0, 3),
    shards=st.integers(1, 4), shard=st.integers(0, 3), widths=st.booleans(),
)  # fmt: skip
def test_rows_of_a_shard_are_known_by_matrix(
    count: int, each: int, cut: int, part: int, shards: int, shard: int, widths: bool
) -> None:
    """Ranks hold consecutive matrices, or some rows of each; shards cut these rows anywhere."""
    total, part, shard = count * each, part % cut, shard % shards
    if widths:
        held = [(at + each * part // cut, at + each * (part + 1) // cut) for at in range(0, total, each)]
    else:
        held = [(each * (count * part // cut), each * (count * (part + 1) // cut))]
    placement = Placement((total, 2), (tuple(held), ((0, 1), (1, 2))))
    whole = torch.cat([torch.arange(start, stop) for start, stop in held])
    rows = range(len(whole) * shard // shards, len(whole) * (shard + 1) // shards)
    mine = whole[rows.start : rows.stop]
    found = rows_of_matrices(placement, rows, count)
    assert sum(at.stop - at.start for at in found.values()) == len(mine)
    for number, at in found.items():
        assert (mine[at] // each == number).all()


EXPERTS = "moe: {experts: 4, top_k: 2, ffn_hidden: 32, shared_experts: 1, first_dense_layers: 1}"
SPEC = """
model: {layers: 3, hidden: 64, ffn_hidden: 192, heads: 4, vocab: 256}
hardware: {accelerator: h100-sxm, per_node: 4}
training: {sequence_length: 64, global_batch: 16}
optimizer: {name: lamb}
data: python-stdlib
parallel: {data: {zero: 1}, tensor: 1, pipeline: 1, compile: none}
"""


@cache
def planned() -> Plan:
    """Return a plan of four data-parallel ranks."""
    return plan_of(SPEC)


def job_of(model: str = "", **fields: Any) -> TrainingWork:
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
    named = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    held = DeviceOptimizer(named, planned().optimizer).state_bytes()
    assert held == 4 * 2 * sum(p.numel() for p in named.values())
    for zero, shards in ((0, 1), (1, 4), (3, 4)):
        terms = rank_memories(job, laid(planned().layout, zero=zero))[0].terms
        assert terms["optimizer"] == pytest.approx(held / shards, abs=8 * 4)


def test_each_expert_has_norms_of_its_own() -> None:
    model = job_of(EXPERTS).model
    counts = scaled_matrices(model, "matrices", ("layers.0.*",))
    assert counts["layers.1.moe.experts.down.weight"] == 4
    assert counts["layers.1.moe.shared.down.weight"] == counts["embed.weight"] == counts["head.weight"] == 1
    assert not any(name.startswith("layers.0.") or "norm" in name for name in counts)
    assert scaled_matrices(model, "all")["final_norm.weight"] == 1


def test_experts_that_transformers_stacks_have_norms_of_their_own() -> None:
    shapes = {"embed.weight": (9, 4), "layers.0.experts.up": (3, 8, 4), "layers.0.conv": (8, 1, 4), "norm": (4,)}
    model = cast(AnyDecoder, SimpleNamespace(whole_shapes=lambda: shapes))
    hf = HfModel(path="/model", model_type="own", architecture="OwnForCausalLM")
    plan = planned().model_copy(update={"hf": hf, "frozen": ("embed.*",)})
    assert matrix_counts(plan, model) == {"layers.0.experts.up": 3, "layers.0.conv": 1}


class MemoryTraffic(TorchDispatchMode):
    """Counts the elements of all tensors with more than one that operators read and write."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.startswith("aten::_foreach"):
            written = [a for a, of in zip(args, func._schema.arguments, strict=False) if of.alias_info is not None]
            read = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            new = [] if result is None else tree_leaves(result)
            moved = [*read.values(), *tree_leaves(written), *new]
            self.elements += sum(each.numel() for each in moved if isinstance(each, torch.Tensor) and each.numel() > 1)
        return result


def test_the_planner_counts_what_the_operators_read_and_write() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = DeviceOptimizer({"w": weight}, planned().optimizer)
    weight.grad = torch.randn(64, 64)
    with MemoryTraffic() as traffic:
        optimizer.step(LR)
    counted = 4 * traffic.elements / weight.numel()
    assert counted == job_of().stack.optimizer_bytes + costs._LAMB_MORE_BYTES
    assert steps.PIECE_ELEMENTS == costs._LAMB_PIECE


def test_the_plan_prices_passes_and_the_sum_of_norms() -> None:
    job = job_of("hidden: 4096, ffn_hidden: 16384, heads: 32, kv_heads: 32, head_dim: 128")
    plain = replace(job, adapt=None)
    layout = planned().layout
    matrices = 3 * 7 + 2
    assert sum(scaled_matrices(job.model, "matrices").values()) == matrices
    found = {name: predict_time(each, layout, 1) for name, each in (("lamb", job), ("adamw", plain))}
    assert found["lamb"].terms_s["optimizer"] > 4 * found["adamw"].terms_s["optimizer"]
    assert found["lamb"].traffic_bytes["optimizer"] == 2 * 3 * (16 * matrices) // 4
    assert found["adamw"].traffic_bytes["optimizer"] == 0
    columns = encode(layout)
    assert float(costs.norms_s(job, columns)) > 0.0
    assert costs.working_bytes(job, columns) == 2 * 4 * costs._LAMB_PIECE
    small = job_of("")
    elements = sum(p.numel() for p in build(small.model).parameters())
    assert float(costs.working_bytes(small, columns)) == pytest.approx(2 * 4 * elements / 4)
    assert (costs.norms_s(plain, columns), costs.norm_bytes(plain, columns)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "sums"),
    [
        ({"zero": 0, "mesh": Mesh(dp_shard=4)}, False),
        ({"zero": 1, "mesh": Mesh()}, False),
        ({"zero": 0, "mesh": Mesh(dp_shard=2, tp=2)}, True),
        ({"zero": 1, "mesh": Mesh(dp_replicate=2, dp_shard=2)}, True),
    ],
)
def test_ranks_that_hold_everything_do_not_sum(fields: dict[str, Any], sums: bool) -> None:
    layout = encode(laid(planned().layout, **fields))
    assert (float(costs.norms_s(job_of(), layout)) > 0.0) == sums == (float(costs.norm_bytes(job_of(), layout)) > 0.0)


@pytest.mark.parametrize(
    ("overrides", "code", "path"),
    [
        (("parallel.offload.optimizer=cpu",), "PT224", ("parallel", "offload", "optimizer")),
        (("optimizer.name=adamw", "optimizer.adapt=all"), "PT226", ("optimizer", "adapt")),
        (("optimizer.name=muon", "optimizer.norm_bounds=[0, 10]"), "PT226", ("optimizer", "norm_bounds")),
        (("optimizer.norm_bounds=[2, 1]",), "PT244", ("optimizer", "norm_bounds")),
        (("optimizer.momentum=0.5",), "PT226", ("optimizer", "momentum")),
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

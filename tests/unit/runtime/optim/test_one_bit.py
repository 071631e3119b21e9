"""0/1 Adam without processes: kinds of steps, messages, state, prices, findings, and steps of one rank."""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from partool.cost.training.one_bit import one_bit_updates
from partool.layout.one_bit import CHUNK, ExchangeSchedule, buckets, exchange_schedule, one_bit_bytes
from partool.layout.parameters import parameters
from partool.layout.tensor import own_partition
from partool.layout.tensor.cutting import by_name
from partool.plan.types import Plan
from partool.planner.make import make_plan
from partool.spec import load_text
from partool.spec.training import CheckpointSpec, LrSchedule, OneBit, OptimizerSpec, TrainingSpec
from partool_runtime.exchanges import Exchanges
from partool_runtime.optim.agreement import agreement
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.grad_norm import LocalSums
from partool_runtime.optim.one_bit import OneBitOptimizer
from partool_runtime.pieces import FlatPlaced
from partool_runtime.placement import Placement, full_placement
from partool_runtime.weights import build

SPEC = """
model: {layers: 3, hidden: 96, heads: 4, kv_heads: 2, vocab: 259, ffn_hidden: 200}
hardware: {accelerator: cpu, per_node: 2}
data: {source: python-stdlib}
training: {sequence_length: 64, global_batch: 8, steps: 200, precision: fp32}
optimizer: {name: zero_one_adam}
"""


def planned(tmp_path: Path, *overrides: str) -> Any:
    """Return the plan, or the diagnostics if there is none."""
    loaded = load_text(SPEC, overrides=list(overrides))
    if loaded.spec is None or any(each.severity == "error" for each in loaded.diagnostics):
        return loaded.diagnostics
    made = make_plan(loaded.spec, base_dir=tmp_path, default_name="one")
    return made.plan or made.diagnostics


@given(
    doubling=st.integers(0, 6),
    freeze=st.integers(1, 60),
    local=st.integers(1, 12),
    most=st.integers(1, 9),
    period=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_kinds_of_steps(doubling: int, freeze: int, local: int, most: int, period: int) -> None:
    steps = 150
    schedule = ExchangeSchedule(doubling, freeze, local, most, steps, (period,))
    kinds = [schedule.kind(step) for step in range(steps)]
    # The interval of variance updates by the paper's recursion, not by the formula of the schedule.
    at, made, full = 0, 0, set()
    while at < freeze:
        full.add(at)
        made += 1
        at += 2 ** ((made - 1) // doubling) if doubling else 1
    assert {step for step, kind in enumerate(kinds) if kind == "full"} == {step for step in full if step < steps}
    assert "local" not in kinds[:freeze]
    assert kinds[-1] != "local"
    assert all(kinds[done - 1] != "local" for done in range(period, steps + 1, period))
    longest = max((len(run) for run in "".join(kind[0] for kind in kinds).replace("f", "o").split("o")), default=0)
    assert longest < most
    assert sum(schedule.counts.values()) == steps
    if most == 1:
        assert schedule.counts["local"] == 0


def test_settings_of_one_bit_adam_and_defaults() -> None:
    training = TrainingSpec(steps=1000)
    one = OptimizerSpec(name="zero_one_adam", one_bit=OneBit(variance_doubling=0, local_most=1, freeze_step=200))
    counts = exchange_schedule(one, training, CheckpointSpec(), 0.0).counts
    assert counts == {"full": 200, "one_bit": 800, "local": 0}
    usual = OptimizerSpec(name="zero_one_adam")
    found = exchange_schedule(usual, training, CheckpointSpec(every=30), 0.0)
    assert (found.freeze_step, found.local_doubling, found.periods) == (150, 100, (30,))
    warm = usual.model_copy(update={"schedule": LrSchedule(warmup_steps=400)})
    assert exchange_schedule(warm, training, CheckpointSpec(every="30min"), 0.0).freeze_step == 400


@given(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=30), ranks=st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_messages(sizes: list[int], ranks: int) -> None:
    found = buckets(sizes)
    assert [size for bucket in found for size in bucket.sizes] == sizes
    for bucket in found:
        places = list(bucket.places())
        assert all(at % CHUNK == 0 for at, _ in places)
        assert all(at + size <= after for (at, size), (after, _) in pairwise(places))
        assert bucket.share(ranks) * ranks >= bucket.chunks
    # At least the bits of all elements leave a rank twice, less its own part.
    assert one_bit_bytes(sizes, ranks, 4) >= 2 * (ranks - 1) / ranks * sum(sizes) / 8
    assert one_bit_bytes(sizes, 1, 4) == 0


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_ranges_of_flat_parts_are_blocks_of_the_whole(
    shape: list[int], cut: tuple[float, float], data: st.DataObject
) -> None:
    # Each dimension of the whole is twice as long, and the rank's part may be two ranges of it.
    spans = []
    for size in shape:
        split = data.draw(st.integers(0, size))
        spans.append(tuple(part for part in ((0, split), (2 * size - (size - split), 2 * size)) if part[0] < part[1]))
    placement = Placement(tuple(2 * size for size in shape), tuple(spans))
    assert placement.local_shape == tuple(shape)
    elements = torch.arange(torch.Size(shape).numel())
    first, stop = sorted(int(share * len(elements)) for share in cut)
    there = torch.full(placement.shape, -1)
    for block in FlatPlaced(elements[first:stop] + 0, placement, first).pieces():
        at = tuple(slice(o, o + size) for o, size in zip(block.offsets, block.tensor.shape, strict=True))
        assert bool((there[at] == -1).all())
        there[at] = block.tensor
    expected = torch.full(placement.shape, -1)
    for box in placement.boxes():
        own = elements.clone()
        own[:first], own[stop:] = -1, -1
        at = tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))
        expected[at] = own.view(shape)[box.local]
    assert torch.equal(there, expected)


def _parameters() -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(3)
    return {name: nn.Parameter(torch.randn(*shape, generator=random)) for name, shape in (("a", (7, 13)), ("b", (5,)))}


def test_full_steps_are_those_of_adamw_bit_for_bit() -> None:
    ours, theirs = _parameters(), _parameters()
    spec = OptimizerSpec(name="zero_one_adam", lr=1e-2)
    schedule = ExchangeSchedule(0, freeze_step=9, local_doubling=1, local_most=1, steps=9)
    exchanges = Exchanges(schedule)
    one = OneBitOptimizer(ours, spec, exchanges=exchanges, group=None, placements={})
    other = DeviceOptimizer(theirs, spec.model_copy(update={"name": "adamw"}))
    for step in range(9):
        exchanges.begin(step)
        for name in ours:
            ours[name].grad = torch.randn(ours[name].shape, generator=torch.Generator().manual_seed(step))
            theirs[name].grad = ours[name].grad.clone()
        one.step(1e-2, 0.5)
        other.step(1e-2, 0.5)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(one.state()[key], value) for key, value in other.state().items())


def test_steps_of_lamb_keep_the_mean_ratio_of_full_steps() -> None:
    spec = OptimizerSpec(name="zero_one_lamb", lr=1e-2, weight_decay=0.3)
    schedule = ExchangeSchedule(0, freeze_step=3, local_doubling=2, local_most=2, steps=9)
    kinds = "".join(schedule.kind(step)[0] for step in range(9))
    assert kinds == "fffoololo"
    ours = {name: nn.Parameter(p.detach().double()) for name, p in _parameters().items()}
    exchanges = Exchanges(schedule)
    one = OneBitOptimizer(ours, spec, exchanges=exchanges, group=None, placements={})
    w = {name: p.detach().clone() for name, p in ours.items()}
    m, v = ({name: torch.zeros_like(p) for name, p in w.items()} for _ in range(2))
    anchor, move = dict(w), {name: torch.zeros_like(p) for name, p in w.items()}
    mean: dict[str, Any] = dict.fromkeys(w, 1.0)
    (beta1, beta2), eps, lr, pending = spec.betas, spec.eps, 1e-2, 0
    for step, kind in enumerate(kinds):
        exchanges.begin(step)
        pending += kind != "f"
        for name, p in ours.items():
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).double()
            p.grad = g.clone()
            decay = 0.3 if name == "a" else 0.0
            m[name] = beta1 * m[name] + (1.0 - beta1) * g
            eta = lr / (1.0 - beta1 ** (step + 1))
            if kind == "f":
                v[name] = beta2 * v[name] + (1.0 - beta2) * g**2
            d = torch.sqrt(v[name] / (1.0 - beta2 ** min(step + 1, 3))) + eps
            if kind == "f":
                u = eta / lr * m[name] / d + decay * w[name]
                ratio = w[name].norm() / u.norm() if name == "a" else 1.0
                mean[name] = ratio if step == 0 else 0.9 * mean[name] + 0.1 * ratio
                w[name] = anchor[name] = w[name] - lr * ratio * u
                continue
            kept, move[name] = 1.0 - mean[name] * lr * decay, move[name] + eta * m[name]
            if kind == "l":
                w[name] = w[name] * kept - mean[name] * eta * m[name] / d
            else:
                w[name] = anchor[name] = anchor[name] * kept**pending - mean[name] * move[name] / d
                move[name] = torch.zeros_like(p)
        pending = 0 if kind == "o" else pending
        one.step(lr, 1.0)
        for name, value in w.items():
            torch.testing.assert_close(ours[name].detach(), value, rtol=1e-12, atol=1e-12)
            m[name] = one.state()[f"exp_avg.{name}"].clone()
    assert set(one.placed_state()) >= {"lamb_ratio.a", "worker_error.a", "worker_error.b"}
    assert "lamb_ratio.b" not in one.placed_state()
    torch.testing.assert_close(one.placed_state()["lamb_ratio.a"], mean["a"], rtol=1e-12, atol=0.0)


def test_errors_of_other_numbers_of_ranks_become_their_mean() -> None:
    exchanges = Exchanges(ExchangeSchedule(0, 1, 1, 2, 5))
    one = OneBitOptimizer(
        _parameters(), OptimizerSpec(name="zero_one_adam"), exchanges=exchanges, group=None, placements={}
    )
    state = one.expect({"updates": 4, "variance_updates": 3, "exchange_ranks": 3})
    assert set(state) == {"worker_error.a", "worker_error.b"}
    for number, value in enumerate(state.values()):
        assert value.shape[0] == 3
        value.tensor.copy_(torch.arange(3.0).view(3, *[1] * (value.tensor.dim() - 1)) + number)
    one.loaded()
    assert (one.updates, one.variance_updates) == (4, 3)
    placed = one.placed_state()
    assert bool((placed["worker_error.a"].tensor == 1.0).all())
    assert bool((placed["worker_error.b"].tensor == 2.0).all())
    assert one.numbers() == {"updates": 4, "variance_updates": 3, "exchange_ranks": 1}


def test_the_plan_counts_steps_bytes_and_state(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert isinstance(plan, Plan)
    found = plan.prediction.time.exchanges
    counts = exchange_schedule(plan.optimizer, plan.training, plan.checkpoint, plan.data.validation).counts
    assert {kind: part.steps for kind, part in found.items()} == counts
    assert found["local"].sent_bytes == 0
    assert found["full"].sent_bytes > 25 * found["one_bit"].sent_bytes > 0
    total = sum(part.steps * part.sent_bytes for part in found.values())
    assert plan.prediction.time.traffic_bytes["gradient_sync"] == total // 200
    assert plan.layout.data.zero == 0
    assert any("send one bit per parameter" in reason for reason in plan.reasons)
    assert not any(reason.startswith("Scales") for reason in plan.reasons)
    tensor = planned(tmp_path, "parallel.tensor.degree=2", "hardware.per_node=4")
    assert any(reason.startswith("Scales: one per 2,048 elements of the part") for reason in tensor.reasons)
    adamw = planned(tmp_path, "optimizer.name=adamw")
    assert adamw.prediction.time.exchanges == {}
    terms = plan.prediction.memory.terms_bytes
    # Beside two moments: the error of this rank, half of the other, moves and the last exchange's weights.
    assert terms["optimizer"] == pytest.approx(terms["parameters"] * 5.5, rel=0.01)
    short = planned(tmp_path, "optimizer.one_bit.local_most=1").prediction.memory.terms_bytes
    assert short["optimizer"] == pytest.approx(short["parameters"] * 3.5, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "code", "path"),
    [
        (("parallel.data.zero=1",), "PT242", ("parallel", "data", "zero")),
        (("parallel.sequence.degree=2",), "PT242", ("parallel", "sequence")),
        (("parallel.pipeline.schedule=weipipe",), "PT242", ("parallel", "pipeline", "schedule")),
        (("model.moe={experts: 4, top_k: 2, ffn_hidden: 64}",), "PT242", ("optimizer", "name")),
        (("parallel.offload.optimizer=cpu",), "PT224", ("parallel", "offload", "optimizer")),
        (("optimizer.name=adamw", "optimizer.one_bit.local_most=2"), "PT226", ("optimizer", "one_bit")),
        (("optimizer.one_bit.freeze_step=0",), "PT104", ("optimizer", "one_bit", "freeze_step")),
    ],
)
def test_findings(tmp_path: Path, overrides: tuple[str, ...], code: str, path: tuple[str, ...]) -> None:
    found = planned(tmp_path, *overrides)
    assert isinstance(found, list), found
    assert (code, path) in [(each.code, each.path) for each in found]


def test_the_plan_says_what_it_would_gain_on_a_slow_link(tmp_path: Path) -> None:
    job = ("optimizer.name=adamw", "training.global_batch=64", "training.precision=bf16", "model={preset: gpt2}")
    plain = ("parallel.tensor.degree=1", "parallel.pipeline.stages=1")
    link = "hardware={accelerator: h100-sxm, nodes: 2, per_node: 1, fabric: ethernet-10g}"
    slow = planned(tmp_path, *job, *plain, link)
    (sentence,) = (reason for reason in slow.reasons if reason.startswith("Slow links"))
    assert sentence.startswith("Slow links: optimizer: {name: zero_one_adam}")
    # What it takes is no more than in the layout that a search would choose, to the error of bounds.
    searched = planned(tmp_path, *job[1:], *plain, link, "optimizer.name=zero_one_adam").prediction.time.step_time_s
    told = re.search(r"would take (\S+) s a step.* layouts? priced with it;", sentence)
    assert told is not None
    assert searched <= 1.01 * float(told[1]) <= 1.02 * searched
    assert slow.optimizer.name == "adamw"
    fast = planned(tmp_path, *job, *plain, "hardware={accelerator: h100-sxm, per_node: 2}")
    assert not any(reason.startswith("Slow links") for reason in fast.reasons)


def test_planned_bytes_are_those_of_the_models_parameters(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    sizes = [parameter.numel() for parameter in build(plan.model).parameters()]
    assert plan.prediction.time.exchanges["one_bit"].sent_bytes == one_bit_bytes(sizes, 2, 4)
    cut = planned(tmp_path, "hardware.per_node=4", "parallel.tensor.degree=2", "parallel.pipeline.stages=1")
    rows = by_name(
        own_partition(cut.model, 2, 1, cut.layout.tensor.sequence_norms), [p.name for p in parameters(cut.model)]
    )
    held = [[prod(row.local_shape(rank)) for row in rows.values()] for rank in range(2)]
    assert cut.prediction.time.exchanges["one_bit"].sent_bytes == max(one_bit_bytes(each, 2, 4) for each in held)


class _Nobody:
    """Ranks of two copies, whose world may not be asked."""

    replicate, tp = SimpleNamespace(size=2), SimpleNamespace(size=1)
    replica, groups = SimpleNamespace(parts=()), SimpleNamespace(of=lambda parts: None)

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges

    @property
    def world(self) -> Any:
        raise AssertionError("a local step asks all ranks")


def test_local_steps_ask_nobody() -> None:
    exchanges = Exchanges(ExchangeSchedule(0, 1, 1, 4, 50))
    ranks: Any = _Nobody(exchanges)
    agreed = agreement(ranks)
    step = next(step for step in range(50) if exchanges.schedule.kind(step) == "local")
    agreed.begin(step)
    assert agreed.local
    assert float(agreed.tokens(torch.tensor(5.0, dtype=torch.float64))) == 10.0
    sums = LocalSums(torch.tensor(9.0, dtype=torch.float64), torch.tensor(True))
    checked = agreed.check(sums, torch.tensor(3.0), lambda: [1.0])
    assert (checked.norm, checked.finite, checked.loss_sum, checked.flags) == (6.0, True, 6.0, ())
    broken = agreed.check(sums._replace(finite=torch.tensor(False)), torch.tensor(3.0), lambda: [1.0])
    assert not broken.finite
    assert agreed.most(3) == 3
    agreed.begin(0)
    with pytest.raises(AssertionError, match="asks all ranks"):
        agreed.tokens(torch.tensor(5.0))


def test_only_optimizers_with_bits_have_exchanges() -> None:
    assert one_bit_updates(OptimizerSpec(), TrainingSpec(), CheckpointSpec(), 0.0) is None
    assert full_placement((3,)).local_shape == (3,)

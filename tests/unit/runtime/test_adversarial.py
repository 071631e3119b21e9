"""Perturbed embeddings: what is drawn, the ascent, the passes in one process, and the planner's figures."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from often import often
from planned import findings_of, plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from partool.cost.training.traffic import traffic, traffic_bytes
from partool.plan.layout import Mesh
from partool.plan.rank_trace import COMPUTE
from partool.plan.types import Plan
from partool.planner.elastic import job_of_plan
from partool.spec.model import Weights
from partool.spec.training import AdversarialSpec
from partool.verify.findings import kind
from partool_runtime import adversarial
from partool_runtime.data.batches import MicroBatch
from partool_runtime.dry.rank import dry_rank, micro_batches
from partool_runtime.dry.world import alone_in, fake_tensors
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import build_ranks, close_ranks, open_ranks
from partool_runtime.model import Decoder
from partool_runtime.model.perturbation import ascended, drawn, first_values
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.weights import fill

sys.path.insert(0, str(Path(__file__).parents[2] / "parity"))
from _hf_models import plan_of as hf_plan_of
from _hf_models import write_model
from _plans import small_plan
from _tensor_plans import EVEN, tensor_plan

NORMS = ("l2", "linf")
LENGTH = 16
Open = Callable[..., Prepared]


def length(norm: str, x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=-1) if norm == "l2" else x.abs().amax(-1)


def split_mix(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    lowest = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & lowest
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & lowest
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_each_number_depends_on_its_place_alone(seed: int) -> None:
    whole = drawn(seed, torch.arange(3, 9), torch.arange(10), 5, torch.float64)
    part = drawn(seed, torch.tensor([7, 4]), torch.tensor([9, 0, 3]), 5, torch.float64)
    assert torch.equal(part, whole[[4, 1]][:, [9, 0, 3]])
    gamma = 0x9E3779B97F4A7C15
    key = split_mix((split_mix((7 + seed * gamma) % 2**64) + 9) % 2**64)
    bits = split_mix((key + 2 * gamma) % 2**64) >> 40
    assert float(part[0, 0, 1]) == bits / 2**23 - 1
    assert torch.equal(whole.float(), drawn(seed, torch.arange(3, 9), torch.arange(10), 5, torch.float32))


def test_numbers_are_even_and_not_alike() -> None:
    found = drawn(1, torch.arange(64), torch.arange(64), 16, torch.float64)
    assert -1.0 <= float(found.min()) < -0.999
    assert 0.999 < float(found.max()) < 1.0
    counts = torch.histc(found, bins=16, min=-1.0, max=1.0)
    assert float((counts / found.numel() * 16 - 1).abs().max()) < 0.05
    for first in range(3):  # sequences, positions and places in the hidden state
        rows = found.transpose(0, first)[:16].flatten(1)
        assert float((torch.corrcoef(rows) - torch.eye(16)).abs().max()) < 5 / math.sqrt(rows.shape[1])
    assert not torch.equal(found, drawn(2, torch.arange(64), torch.arange(64), 16, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_perturbations_stay_in_their_ball(norm: Any, dtype: torch.dtype) -> None:
    spec = AdversarialSpec(epsilon=0.3, step_size=0.25, noise=1.0, norm=norm)
    gradient = torch.randn(4, 6, 8, dtype=dtype) * torch.logspace(-30, 10, 6, dtype=dtype)[:, None]
    before = first_values(spec, drawn(0, torch.arange(4), torch.arange(6), 8, dtype))
    after = ascended(spec, before, gradient)
    limit = 0.3 * (1 + 4 * torch.finfo(dtype).eps)
    assert float(length(norm, before).max()) <= limit
    assert float(length(norm, after).max()) <= limit
    assert bool(((after - before) * gradient).sum(-1).gt(0).all()), "the step does not rise"
    short = ascended(spec.model_copy(update={"step_size": 0.01}), before * 0.1, gradient)
    assert torch.allclose(length(norm, short - before * 0.1), torch.tensor(0.01, dtype=dtype), rtol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_a_token_without_a_gradient_does_not_move(norm: Any) -> None:
    spec = AdversarialSpec(epsilon=0.3, norm=norm)
    before = torch.rand(1, 2, 4) * 0.1
    gradient = torch.stack([torch.zeros(4), torch.ones(4)])[None]
    after = ascended(spec, before, gradient)
    assert torch.equal(after[:, 0], before[:, 0])
    assert not torch.equal(after[:, 1], before[:, 1])


def with_noise(plan: Plan, **settings: Any) -> Plan:
    """Return a plan with these settings of adversarial training."""
    spec = AdversarialSpec.model_validate({"epsilon": 0.5, "step_size": 0.4} | settings)
    return plan.model_copy(update={"training": plan.training.model_copy(update={"adversarial": spec})})


@pytest.fixture
def opened() -> Iterator[Open]:
    """Function that prepares a plan's model on this process, one plan after the other, with the same weights."""
    ranks = []

    def open_(plan: Plan) -> Prepared:
        if not ranks:
            ranks.append(open_ranks(plan))
        prepared = prepare(plan, ranks[0], lambda done, sent: None)
        weights = Weights(source="hf", path=plan.hf.path) if plan.hf else plan.weights
        fill(prepared.model, weights, seed=1)
        return prepared

    yield open_
    close_ranks()


def sequences(first: int, count: int, vocab: int = 257) -> MicroBatch:
    """Return sequences of the order of a run."""
    draws = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab, (20, LENGTH + 1), generator=draws)[first : first + count]
    labels = tokens[:, 1:].clone()
    labels[first % 2 :: 2, -3:] = -100
    return MicroBatch(tokens[:, :-1], labels, None, first)


def step(prepared: Prepared, *batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step's passes and the gradients."""
    loss = prepared.passes.step(batch, torch.tensor(0.01, dtype=torch.float64), lambda term: nullcontext())
    named = dict(prepared.model.named_parameters())
    found = {}
    for name, parameter in named.items():
        assert parameter.requires_grad
        assert parameter.grad is not None
        found[name] = parameter.grad.to_local().clone()  # type: ignore[attr-defined]
        parameter.grad = None
    return float(loss), found


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, gradient in one[1].items() if not torch.equal(gradient, other[1][name])] == []


CASES = [{"zero": 0}, {"zero": 2, "accumulation": 3}, {"zero": 3, "accumulation": 2, "recompute": "full"}]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fields", CASES)
def test_before_the_start_and_without_a_perturbation_steps_are_plain(
    opened: Open, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_plan(tmp_path, ranks=1, precision="fp64", **fields)
    batch = [sequences(12, 4), sequences(16, 4)]
    wanted = step(opened(plain), *batch)
    prepared = opened(with_noise(plain, start_step=2))
    assert_equal(step(prepared, *batch), wanted)  # the second of two plain steps, which have 12 sequences each
    assert step(prepared, *[replace(each, first=each.first + 12) for each in batch])[0] != wanted[0]
    monkeypatch.setattr(adversarial, "ascended", lambda spec, before, gradient: 0 * before)
    assert_equal(step(opened(with_noise(plain)), *batch), wanted)


def by_hand(plan: Plan, model: Decoder, micro: MicroBatch) -> torch.Tensor:
    """Return the loss on perturbed embeddings, with torch's own operators on a whole model."""
    spec, seed = plan.training.adversarial, plan.training.seed
    numbers = torch.arange(micro.first, micro.first + len(micro.tokens_BS))
    start = drawn(seed, numbers, torch.arange(LENGTH), plan.model.hidden, torch.float64)
    start *= spec.epsilon * spec.noise / (plan.model.hidden**0.5 if spec.norm == "l2" else 1.0)
    look_up = model.embed.forward
    added = start.requires_grad_()
    model.embed.forward = lambda tokens: look_up(tokens) + added  # type: ignore[method-assign]
    (gradient,) = torch.autograd.grad(model(micro.tokens_BS, micro.labels_BS), added)
    added = start.detach()
    if spec.norm == "l2":
        added += spec.step_size * torch.nn.functional.normalize(gradient, dim=-1, eps=1e-30)
        added *= (spec.epsilon / added.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    else:
        added = (added + spec.step_size * gradient.sign()).clamp(-spec.epsilon, spec.epsilon)
    loss: torch.Tensor = model(micro.tokens_BS, micro.labels_BS)
    model.embed.forward = look_up  # type: ignore[method-assign]
    return loss


@pytest.mark.timeout(60)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_of_the_perturbed_loss(opened: Open, norm: str, tmp_path: Path) -> None:
    """In one micro-batch or several."""
    plan = with_noise(small_plan(tmp_path, ranks=1, zero=3, accumulation=1, precision="fp64"), norm=norm, noise=0.7)
    whole, parts = sequences(4, 6), [sequences(4, 4), sequences(8, 2)]
    parts[1].labels_BS.copy_(whole.labels_BS[4:])
    prepared = opened(plan)
    model = Decoder(plan.model).double()
    model.load_state_dict({name: p.full_tensor() for name, p in prepared.model.named_parameters()})  # type: ignore[attr-defined]
    loss = by_hand(plan, model, whole)
    (0.01 * loss).backward()
    for found in (step(prepared, whole), step(prepared, *parts)):
        assert found[0] == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(found[1][name], parameter.grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("norm", NORMS)
def test_a_tiny_step_raises_the_loss_by_the_norm_of_the_gradient(
    opened: Open, norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_plan(tmp_path, ranks=1, zero=1, precision="fp64")
    micro, gradients = sequences(0, 6), []

    def seen(spec: AdversarialSpec, before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        gradients.append(gradient / 0.01)
        return ascended(spec, before, gradient)

    monkeypatch.setattr(adversarial, "ascended", seen)
    clean, _ = step(opened(plain), micro)
    raised, _ = step(opened(with_noise(plain, noise=0.0, step_size=1e-6, norm=norm)), micro)
    dual = gradients[0].norm(dim=-1) if norm == "l2" else gradients[0].abs().sum(-1)
    assert raised - clean > 0
    assert raised - clean == pytest.approx(1e-6 * float(dual.sum()), rel=1e-4)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.timeout(60)
def test_the_ascent_computes_no_gradients_of_weights(opened: Open, tmp_path: Path) -> None:
    plain = small_plan(tmp_path, ranks=1, zero=3, accumulation=1, precision="fp64")
    counts = []
    for plan in (plain, with_noise(plain)):
        prepared = opened(plan)
        with Products() as counted:
            step(prepared, sequences(0, 4))
        counts.append(counted.calls)
    matrices = sum(len(info.shape) == 2 for info in prepared.model.parameters()) - 1  # without the embedding
    forward, inputs = matrices, matrices
    assert counts[1]["mm"] - counts[0]["mm"] == forward + inputs
    assert counts[0]["mm"] >= forward + inputs + matrices


@pytest.mark.timeout(60)
def test_dropout_is_drawn_alike_in_both_passes(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model("gpt_neox_dropout", tmp_path)
    base = small_plan(tmp_path, ranks=1, precision="fp64", model={"vocab": 31})
    plain = hf_plan_of(base, path, Mesh(), zero=0)
    micro = sequences(0, 4, vocab=31)
    micro = replace(micro, tokens_BS=micro.tokens_BS[:, :8], labels_BS=micro.labels_BS[:, :8])
    monkeypatch.setattr(adversarial, "ascended", lambda spec, before, gradient: 0 * before)
    found = []
    for plan in (plain, plain, with_noise(plain)):
        short = plan.training.model_copy(update={"sequence_length": 8})
        prepared = opened(plan.model_copy(update={"training": short}))
        torch.manual_seed(len(found) == 0)
        found.append(step(prepared, micro))
    assert found[0][0] != found[1][0], "nothing is drawn"
    assert_equal(found[2], found[1])


def collectives(plan: Plan) -> Counter[str]:
    """Return the number of collectives of a step on rank 0, by kind; those of one rank do not count."""
    trace = dry_rank(plan, 0, repeat=False)
    used = [trace.vocabulary[index] for index in trace.order if index != COMPUTE]
    return Counter(kind(each) for each in used if len(each.group) > 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("zero", often(range(4), [2, 3]))
def test_nothing_more_is_reduced(zero: int, tmp_path: Path) -> None:
    """Parameters are gathered once more for each pass with ZeRO-3; the price says how often."""
    plain = small_plan(tmp_path, ranks=2, zero=zero, accumulation=3)
    counts = [collectives(plan) for plan in (plain, with_noise(plain))]
    more = counts[1] - counts[0]
    assert not counts[0] - counts[1]
    expected = [traffic(job_of_plan(plan, plan.devices), plan.layout) for plan in (plain, with_noise(plain))]
    assert more["all_gather"] == expected[1].gather_calls - expected[0].gather_calls == (3 * 7 if zero == 3 else 0)
    assert +more == Counter({"all_gather": 21} if zero == 3 else {})
    assert expected[1].scatter_bytes == expected[0].scatter_bytes


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sequence_norms", [False, True])
def test_the_traffic_of_tensor_ranks_is_priced(sequence_norms: bool, tmp_path: Path) -> None:
    """The ascent has no gradient of embeddings to exchange, and gathers no inputs for gradients of weights."""
    plain = tensor_plan(tmp_path, Mesh(tp=2), sequence_norms=sequence_norms, recompute="full", settings={"zero": 0})
    sent = []
    for plan in (plain, with_noise(plain)):
        counter = CommCounter()
        with alone_in(2, 0), fake_tensors() as tensors:
            ranks = replace(build_ranks(plan, torch.device("cpu")), tensors=tensors)
            prepared = prepare(plan, ranks, lambda done, sent: None)
            with tensors(), counter:
                prepared.passes.step(micro_batches(plan), torch.ones(()), lambda term: nullcontext())
        sent.append(sum(each.sent_bytes for each in counter.snapshot().values()))
    told = [
        traffic_bytes(job_of_plan(plan, plan.devices), plan.layout)["tensor"] for plan in (plain, with_noise(plain))
    ]
    assert sent == told
    assert 1.5 * sent[0] < sent[1] <= 2 * sent[0]


SPEC = """\
model: {layers: 16, hidden: 2048, heads: 16, vocab: 32000}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {global_batch: 64, sequence_length: 2048, steps: 100}
parallel: {data: {zero: 3}, tensor: 1, pipeline: 1, sequence: 1, micro_batch: 1, recompute: none}
"""


def asking(words: str, spec: str = SPEC) -> str:
    return spec.replace("steps: 100", f"steps: 100, adversarial: {{{words}}}")


def test_a_perturbed_step_costs_two_more_passes_without_gradients_of_weights() -> None:
    plain, half, whole = (
        plan_of(text) for text in (SPEC, asking("epsilon: 0.1, start_step: 50"), asking("epsilon: 0.1"))
    )
    plans = [plan.prediction.time for plan in (plain, half, whole)]
    for name, factor in (("matmul_forward", 2.0), ("matmul_backward", 1.5), ("attention_backward", 2.0)):
        assert plans[2].breakdown_s[name] / plans[0].breakdown_s[name] == pytest.approx(factor, rel=0.03)
    for name, factor in (("forward", 2.0), ("backward", 1.6)):
        assert plans[2].terms_s[name] / plans[0].terms_s[name] == pytest.approx(factor, rel=0.07)
        mean = (plans[0].terms_s[name] + plans[2].terms_s[name]) / 2
        assert plans[1].terms_s[name] == pytest.approx(mean, rel=0.01)
    assert plans[1].total_s == 100 * plans[1].step_time_s
    gathered = [time.traffic_bytes["parameter_gather"] for time in plans]
    assert gathered[1:] == [pytest.approx(1.5 * gathered[0]), pytest.approx(2 * gathered[0])]
    assert plans[2].traffic_bytes["gradient_sync"] == plans[0].traffic_bytes["gradient_sync"]
    assert any("Perturbed embeddings in 50% of the steps" in reason for reason in half.reasons)
    assert not any("Perturbed" in reason for reason in plain.reasons)
    more = whole.prediction.memory.terms_bytes["activations"] - plain.prediction.memory.terms_bytes["activations"]
    assert more == 2048 * 2048 * 4


def test_the_bound_stays_below_the_price() -> None:
    """The search finds the same layout as pricing all of them would: a looser spec is no faster than a stricter one."""
    open_ = asking("epsilon: 0.1", SPEC.replace("zero: 3", "zero: auto").replace("recompute: none", "recompute: auto"))
    best = plan_of(open_).prediction.time.step_time_s
    for zero in (1, 2, 3):
        for recompute in ("none", "selective", "full"):
            fixed = open_.replace("zero: auto", f"zero: {zero}").replace("recompute: auto", f"recompute: {recompute}")
            assert plan_of(fixed).prediction.time.step_time_s >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    "change",
    [
        ("pipeline: 1", "pipeline: 2"),
        ("tensor: 1", "tensor: {degree: 4, shape: [2, 2]}"),
        ("vocab: 32000", "vocab: 32000, moe: {experts: 4, top_k: 2, ffn_hidden: 512}"),
        ("model:", "engine: deepspeed\nmodel:"),
    ],
)
def test_what_does_not_go_together_is_found(change: tuple[str, str]) -> None:
    assert "PT498" not in {found.code for found in findings_of(SPEC.replace(*change))}
    assert "PT498" in {found.code for found in findings_of(asking("epsilon: 0.1").replace(*change))}


def test_stages_are_settled_to_one() -> None:
    text = asking("epsilon: 0.1").replace("pipeline: 1, ", "").replace("data: {zero: 3}, tensor: 1", "tensor: auto")
    plan = plan_of(text.replace("2048", "512"))
    assert plan.layout.mesh.pp == plan.layout.tensor.inner == 1


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(tp=4)])
def test_an_edited_plan_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    more: dict[str, Any] = {"stages": ((0, 1), (1, 4))} if mesh.pp > 1 else {"tensor_inner": 2, "model": EVEN}
    plan = with_noise(tensor_plan(tmp_path, mesh, settings={"zero": 0}, **more))
    with pytest.raises(ConfigurationError, match="PT498"):
        adversarial.check_perturbable(plan)

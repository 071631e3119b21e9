"""Ranks of test_tensor_hf.py: models of transformers over tensor ranks against transformers itself, in float64."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # what all models need, before ranks are copied: it takes seconds
from _hf_models import MODELS, plan_of, write_model
from _plans import small_plan
from _ranks import in_group

from partool.plan.layout import Mesh
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import Weights
from partool.spec.training import LrSchedule, OptimizerSpec, Precision
from partool_runtime.data.batches import MicroBatch
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import AnyDecoder
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.pieces import pieces
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.torch_internals.tensors import local
from partool_runtime.weights import fill, post_load

LENGTH, STEPS, SEQUENCES = 7, 5, 4
OPTIMIZER = OptimizerSpec(lr=0.02, weight_decay=0.1, clip=0.4, schedule=LrSchedule(warmup_steps=3))
BF16 = 0.05
"""Tolerance relative to the largest value: a few times the distance of neighbouring bf16 numbers, 2^-8."""


def folder() -> Path:
    """Return the folder of the models that tests write once per session."""
    return Path(os.environ["PARTOOL_HOME"]) / "models"


def written(*names: str) -> None:
    """Write models that are not there yet; on one rank, before others read them."""
    for name in names:
        if not (folder() / name).exists():
            write_model(name, folder())


@dataclass(frozen=True)
class Case:
    model: str
    tp: int = 1
    dp: int = 1
    pp: int = 1
    fields: tuple[tuple[str, Any], ...] = ()
    patterns: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    precision: Precision = "fp64"

    def plan(self) -> Plan:
        base = small_plan(Path("unused"), ranks=self.dp * self.tp * self.pp)
        training = base.training.model_copy(
            update={
                "sequence_length": LENGTH, "precision": self.precision, "steps": STEPS, "global_batch": SEQUENCES,
            }
        )  # fmt: skip
        plan = base.model_copy(update={"training": training, "frozen": self.frozen})
        mesh = Mesh(pp=self.pp, dp_shard=self.dp, tp=self.tp)
        return plan_of(plan, folder() / self.model, mesh, dict(self.patterns), **dict(self.fields))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a step over all ranks; some labels are ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(31, (SEQUENCES, LENGTH + 1), generator=generator)
    tokens[0, 1] = 3  # Llama's padding, whose row has no gradient
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return tokens[:, :-1], labels


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the token losses, from all logits that transformers computes."""
    with KeepWide():
        logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@functools.cache
def reference(name: str, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Gradients of one step, and five training steps, of transformers' own model with torch's own optimizer."""
    path = str(folder() / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).double()  # buffers too
    model.train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    named = {n: p for n, p in model.named_parameters() if not any(fnmatch(n, pattern) for pattern in frozen)}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(0.9, 0.95), eps=OPTIMIZER.eps, foreach=False)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        mean = loss_of(model, tokens, labels) / (labels != -100).sum()
        mean.backward()
        if step == 0:
            out["grads"] = {n: p.grad.clone() for n, p in named.items()}
        norm = float(torch.stack([p.grad.square().sum() for p in named.values()]).sum().sqrt())
        for parameter in named.values():
            # torch's clipping adds 1e-6 to the norm.
            parameter.grad *= min(1.0, OPTIMIZER.clip / norm)
        out["norms"].append(norm)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * lr_factor(OPTIMIZER.schedule, step, STEPS)
        optimizer.step()
        out["losses"].append(float(mean.detach()))
    out["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        out["validation"] = float(loss_of(model, *batch(99))) / int((batch(99)[1] != -100).sum())
    return out


def close(ours: float, theirs: float, what: object) -> None:
    assert abs(ours - theirs) <= 1e-10 * max(1.0, abs(theirs)), (what, ours, theirs)


def same_pieces(
    model: AnyDecoder, name: str, ours: torch.Tensor, theirs: torch.Tensor, bound: float, what: Any
) -> None:
    """Compare what this rank holds with its places in the whole; ``bound`` is relative to the whole's largest."""
    limit = bound * max(1.0, theirs.abs().max().item())
    for piece in pieces(ours, model.placements.get(name)):
        place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
        assert piece.tensor.shape == theirs[place].shape, (what, name)
        error = (piece.tensor - theirs[place]).abs().max().item() if piece.tensor.numel() else 0.0
        assert error <= limit, f"{what} {name}: {error} > {limit}"


def check(case: Case) -> None:
    """Gradients of the first step, five optimizer steps, and a validation."""
    plan, expected = case.plan(), reference(case.model, case.frozen)
    ranks = build_ranks(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent: None)
    model = prepared.model
    trained = trained_parameters(model)
    optimizer = DeviceOptimizer(trained, OPTIMIZER, model.copies)
    fill(model, Weights(source="hf", path=str(folder() / case.model)), seed=0)
    post_load(model)
    assert set(model.whole_shapes()) == set(expected["weights"]), case
    stepper = Stepper(
        prepared.passes, optimizer, LossScaler(False), ranks=ranks, training=plan.training, spec=OPTIMIZER
    )
    check_gradients(case, ranks, prepared, trained)
    optimizer.clear_gradients()
    for step in range(STEPS):
        result = stepper.step(step, micro_batches(case, step, ranks), lambda term: contextlib.nullcontext())
        close(result.loss, expected["losses"][step], (case, step, "loss"))
        close(result.grad_norm, expected["norms"][step], (case, step, "norm"))
    for name, parameter in model.named_parameters():
        same_pieces(model, name, parameter.detach(), expected["weights"][name], 1e-10, case)
    validated = stepper.validate(micro_batches(case, 99, ranks))
    assert validated is not None
    close(validated[0], expected["validation"], (case, "validation"))


def check_gradients(case: Case, ranks: Ranks, prepared: Prepared, trained: Mapping[str, torch.Tensor]) -> None:
    weight = 1.0 / (batch(0)[1] != -100).sum().double()
    prepared.passes.step(micro_batches(case, 0, ranks), weight, lambda term: contextlib.nullcontext())
    for name, parameter in trained.items():
        theirs = reference(case.model)["grads"][name]
        ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        same_pieces(prepared.model, name, ours, theirs, 1e-12, (case, "gradient"))


def check_bf16(name: str) -> None:
    """Mixed precision: every gradient is that of float64 up to rounding, and is kept in float32."""
    case = Case(name, tp=2, fields=(("recompute", ("full", "none")),), precision="bf16")
    plan, expected = case.plan(), reference(name)
    ranks = build_ranks(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent: None)
    fill(prepared.model, Weights(source="hf", path=str(folder() / name)), seed=0)
    post_load(prepared.model)
    weight = 1.0 / (batch(0)[1] != -100).sum().double()
    loss = prepared.passes.step(micro_batches(case, 0, ranks), weight, lambda term: contextlib.nullcontext())
    assert abs(float(loss * weight) / expected["losses"][0] - 1) < BF16
    for parameter, value in trained_parameters(prepared.model).items():
        theirs = expected["grads"][parameter]
        ours = torch.zeros_like(value) if value.grad is None else value.grad
        assert ours.dtype == torch.float32
        largest = theirs.abs().max()
        same_pieces(prepared.model, parameter, ours / largest, theirs / largest, BF16, (case, "gradient"))


def check_dropout(name: str, policies: tuple[str, ...]) -> None:
    """Tensor ranks agree on the loss, what is computed again draws again what it drew, and an evaluation draws not."""
    found = []
    for policy in ("none", *policies):
        case = Case(name, tp=2, fields=(("recompute", (policy,) * 2),))
        plan = case.plan()
        ranks = build_ranks(plan, torch.device("cpu"))
        torch.manual_seed(7)
        prepared = prepare(plan, ranks, lambda done, sent: None)
        fill(prepared.model, Weights(source="hf", path=str(folder() / case.model)), seed=0)
        batches = micro_batches(case, 0, ranks)
        evaluated = [prepared.passes.evaluate(iter(batches), lambda: False) for _ in range(2)]
        assert evaluated[0] is not None
        assert evaluated[0] == evaluated[1]
        torch.manual_seed(8)
        loss = prepared.passes.step(batches, torch.ones(()), lambda term: contextlib.nullcontext())
        assert abs(float(loss - evaluated[0])) > 1e-3, "training must drop something"
        after = torch.rand(())
        everywhere = [torch.zeros_like(loss) for _ in range(2)]
        torch.distributed.all_gather(everywhere, loss)
        assert everywhere[0] == everywhere[1]
        grads = {name: local(p.grad) for name, p in prepared.model.named_parameters() if p.grad is not None}
        found.append((policy, loss, grads, after))
    _, loss, grads, after = found[0]
    for policy, again, grads_again, after_again in found[1:]:
        assert (again, after_again) == (loss, after), (name, policy)
        for parameter, grad in grads_again.items():
            assert torch.allclose(grad, grads[parameter], rtol=0, atol=1e-12), (name, policy, parameter)


def micro_batches(case: Case, step: int, ranks: Ranks) -> list[MicroBatch]:
    tokens, labels = batch(step)
    each, place = SEQUENCES // case.dp, ranks.dp.place
    mine = slice(place * each, (place + 1) * each)
    return [MicroBatch(t, label) for t, label in zip(tokens[mine].split(2), labels[mine].split(2), strict=True)]


def staged(schedule: str, stages: int, **fields: Any) -> tuple[tuple[str, Any], ...]:
    """Layout of a pipeline of two ranks over the deep models' four layers."""
    spans = tuple((first * 4 // stages, (first + 1) * 4 // stages) for first in range(stages))
    return tuple({"schedule": schedule, "stages": spans, "chunks": stages // 2, **fields}.items())


PIPELINES = [
    Case("qwen3_deep", pp=2, fields=staged("1f1b", 2, zero=1)),
    Case("qwen3_deep", pp=2, fields=staged("zb-v", 4, zero=3)),
    Case("gpt_neox_deep", pp=2, fields=staged("zb-h1", 2, zero=2, recompute=("full",) * 4)),
    # Their embeddings keep a factor in a buffer, and are tied.
    Case("gemma_deep", pp=2, fields=staged("zb-v", 4, zero=1)),
    Case("gemma3_text_deep", pp=2, fields=staged("hanayo", 4, zero=1)),
]
CROSSED = [
    Case("qwen3_deep", pp=2, tp=2, fields=staged("zb-v", 4, zero=2)),
    Case("gpt_neox_deep", pp=2, tp=2, fields=staged("1f1b", 2, zero=3)),
    Case("qwen3_deep", pp=2, dp=2, fields=staged("1f1b", 2, zero=3)),
]
LAYOUTS = [
    (("recompute", ("full",) * 2),),
    (("recompute", ("selective",) * 2), ("tensor_overlap", "backward")),
    (("recompute", ("attention",) * 2), ("tensor_chunks", 2)),
]


GATHERED = tuple(dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), "column_gathered").items())
FROZEN = ("model.layers.0.*", "*.1.self_attn.k_proj.*", "*.1.mlp.down_proj.weight", "model.norm.*")
SHALLOW = [name for name in MODELS if not name.endswith(("_deep", "_dropout", "_single"))]


def cases(world: int, chosen: str) -> list[Case]:
    """Return what so many ranks check: models, layouts or pipelines."""
    if chosen == "pipelines":
        return CROSSED
    if chosen == "layouts":
        return [Case(name, tp=world, fields=fields) for fields in LAYOUTS for name in ("llama", "deepseek_v2")]
    if world == 2:
        plain = [Case(name, dp=2, fields=(("zero", 3),)) for name in ("llama", "mixtral", "phi")]
        # One rank has the only head, and the other none.
        single = Case("mistral_single", tp=2, patterns=GATHERED)
        frozen = Case("qwen2", tp=2, frozen=FROZEN)
        return [*plain, *(Case(name, tp=2) for name in (*SHALLOW, "gemma_deep")), single, frozen, *PIPELINES]
    if world == 3:
        return [Case(name, tp=3) for name in SHALLOW]
    return [Case(name, tp=2, dp=2, fields=(("zero", number % 4),)) for number, name in enumerate(SHALLOW)]


DROPPING = {
    "": {"llama_dropout": ("full",)},
    "layouts": dict.fromkeys(("gpt_neox_dropout", "llama_dropout"), ("full", "selective", "attention")),
}
"""By what is chosen: models with dropout, and policies of recomputation; for two ranks."""


def dropping(world: int, chosen: str) -> dict[str, tuple[str, ...]]:
    """Return what so many ranks check of dropout."""
    return DROPPING.get(chosen, {}) if world == 2 else {}


def check_case(case: Case) -> None:
    """Compare one case with transformers' own model."""
    torch.use_deterministic_algorithms(True)  # new memory holds NaN, which no loss may reach
    with in_group():
        check(case)


def check_dropout_of(name: str, policies: tuple[str, ...]) -> None:
    """Compare a model with dropout under policies of recomputation."""
    torch.use_deterministic_algorithms(True)
    with in_group():
        check_dropout(name, policies)


def check_bf16_of(name: str) -> None:
    """Compare a model in bfloat16."""
    torch.use_deterministic_algorithms(True)
    with in_group():
        check_bf16(name)

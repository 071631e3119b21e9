"""Ranks of test_tensor.py: the decoder over tensor ranks against the same decoder in one process, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from _expected_traffic import tensor_calls
from _plans import small_plan
from _ranks import joined
from layouts import laid

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import Mla, ModelConfig, RopeScaling, Weights
from partool.spec.training import LrSchedule, OptimizerSpec
from partool.work.training import TrainingWork
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import AnyDecoder, Decoder
from partool_runtime.model.projection import Linear
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel import parallelize
from partool_runtime.parallel.apply import compile_blocks
from partool_runtime.parallel.comm import CollectiveTraffic, CommCounter
from partool_runtime.parallel.passes import PlainPasses
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tensor.apply import apply_tensor, first_row, make_team
from partool_runtime.parallel.tensor.columns import columns
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tensor.rows import row
from partool_runtime.parallel.tensor.symmetric import check_symmetric
from partool_runtime.parallel.tensor.sync import TensorGradients
from partool_runtime.parallel.tensor.vocabulary import vocabulary_loss
from partool_runtime.parallel.zero import shard, trained_parameters
from partool_runtime.pieces import pieces
from partool_runtime.precision import MASTER_DTYPE, LossScaler
from partool_runtime.weights import build, build_parts, fill, freeze, materialise

SIZES: dict[str, Any] = {"layers": 2, "hidden": 13, "ffn_hidden": 11, "vocab": 31, "init_std": 0.2}
GPT: dict[str, Any] = {"norm": "layernorm", "position": "learned", "activation": "gelu", "max_position": 9}
CONFIGS = {
    "mha": ModelConfig(**SIZES, heads=5, kv_heads=5, head_dim=4),
    "gqa": ModelConfig(
        **SIZES, heads=14, kv_heads=7, head_dim=2, qk_norm=True, tied_embeddings=True, window=3,
        layer_types=("full", "sliding"),
    ),
    "shared": ModelConfig(**SIZES, heads=6, kv_heads=2, head_dim=2, qk_norm=True, qkv_bias=True, out_bias=True),
    "gpt": ModelConfig(
        **SIZES | {"vocab": 5, "ffn_hidden": 3}, **GPT, heads=3, kv_heads=3, head_dim=4, qkv_bias=True, out_bias=True,
        ffn_bias=True, tied_embeddings=True,
    ),
    "latent": ModelConfig(
        **SIZES, heads=5, kv_heads=5, head_dim=5, qkv_bias=True, out_bias=True,
        mla=Mla(q_rank=7, kv_rank=6, nope_head_dim=3, rope_head_dim=2, v_head_dim=4),
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position=4, mscale=0.5, mscale_all_dim=0.8),
    ),
    "latent-lite": ModelConfig(
        **SIZES, heads=3, kv_heads=3, head_dim=5, qkv_bias=True, out_bias=True, window=3,
        layer_types=("full", "sliding"), mla=Mla(kv_rank=6, nope_head_dim=3, rope_head_dim=2, v_head_dim=7),
    ),
}  # fmt: skip
"""Over 4 ranks: 5 heads are 2, 2, 1, 0; of 2 heads of keys each lies on two ranks; 5 tokens are 2, 2, 1, 0."""
LENGTH, STEPS, SEQUENCES = 7, 5, 4
OPTIMIZER = OptimizerSpec(lr=0.02, weight_decay=0.1, clip=0.4, schedule=LrSchedule(warmup_steps=3))


@dataclass(frozen=True)
class Case:
    model: str
    tp: int
    dp: int = 1
    zero: int = 1
    layout: tuple[tuple[str, Any], ...] = ()
    chunk_logits: int = 0
    """If not 0, logits that exist at once."""
    accumulation: int = 1
    halved: bool = False
    """Gradients of weights come later, as in pipelines that halve their backward passes."""
    compiled: bool = False
    precision: str = "fp64"
    frozen: tuple[str, ...] = ()

    def plan(self) -> Plan:
        base, config = small_plan(Path("unused"), ranks=self.dp * self.tp), CONFIGS[self.model]
        fields: dict[str, Any] = {
            "mesh": Mesh(dp_shard=self.dp, tp=self.tp), "zero": self.zero, "recompute": ("none",) * config.layers,
            "stages": ((0, config.layers),), "accumulation": self.accumulation,
            "micro_batch": SEQUENCES // self.dp // self.accumulation,
        }  # fmt: skip
        layout = laid(base.layout, **(fields | dict(self.layout)))
        training = base.training.model_copy(
            update={"sequence_length": LENGTH, "precision": self.precision, "steps": STEPS, "global_batch": SEQUENCES}
        )
        partition = own_partition(config, self.tp, sequence_norms=layout.tensor.sequence_norms)
        return base.model_copy(update={"model": config, "layout": layout, "training": training, "partition": partition})


Whole = TypeVar("Whole", bound=AnyDecoder)


def whole_model(config: ModelConfig) -> Decoder:
    model = build(config)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    return perturbed(model)


def perturbed(model: Whole) -> Whole:
    """Give norms and biases other values than ones and zeros, the same in every cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = model.whole_shapes()[name]
            if len(shape) > 1:
                continue
            values = torch.linspace(-0.3, 0.4, shape[0], dtype=torch.float64) + (0.0 if name.endswith("bias") else 1.0)
            for piece in pieces(parameter, model.placements.get(name)):
                piece.tensor.copy_(values[piece.offsets[0] : piece.offsets[0] + piece.tensor.shape[0]])
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a step over all ranks; some labels are ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(5, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return tokens[:, :-1], labels


@functools.cache
def reference(name: str) -> dict[str, Any]:
    """Gradients of one pass, and five training steps, of the whole model with torch's own optimizer and clipping."""
    model = whole_model(CONFIGS[name])
    total = model(*batch(0))
    total.backward()
    named = dict(model.named_parameters())
    out: dict[str, Any] = {"loss": total.detach(), "grads": {n: p.grad.clone() for n, p in named.items()}}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(0.9, 0.95), eps=OPTIMIZER.eps, foreach=False)
    out |= {"losses": [], "norms": []}
    for step in range(STEPS):
        tokens, labels = batch(step)
        optimizer.zero_grad()
        mean = model(tokens, labels) / (labels != -100).sum()
        mean.backward()
        norm = float(torch.stack([p.grad.square().sum() for p in named.values()]).sum().sqrt())
        for parameter in named.values():
            # torch's clipping adds 1e-6 to the norm.
            parameter.grad *= min(1.0, OPTIMIZER.clip / norm)
        out["norms"].append(norm)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * lr_factor(OPTIMIZER.schedule, step, STEPS)
        optimizer.step()
        out["losses"].append(float(mean))
    out["weights"] = {n: p.detach().clone() for n, p in named.items()}
    out["validation"] = float(model(*batch(99))) / int((batch(99)[1] != -100).sum())
    return out


def same(ours: torch.Tensor, theirs: torch.Tensor, bound: float, what: object) -> None:
    assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
    if ours.numel():
        error, limit = (ours - theirs).abs().max().item(), bound * max(1.0, theirs.abs().max().item())
        assert error <= limit, f"{what}: {error} > {limit}"


def patch_loss(model: Decoder, team: Team, chunk_logits: int) -> None:
    """Let at most so many logits exist at once."""
    holder: Any = model if model.head is None else model.head
    name = "embed.weight" if model.head is None else "head.weight"
    holder.loss = functools.partial(
        vocabulary_loss, first=first_row(model.placements, name), team=team, chunk_logits=chunk_logits
    )


def close(ours: float, theirs: float, case: Case, what: object) -> None:
    bound = 1e-10 if case.precision == "fp64" else 0.02
    assert abs(ours - theirs) <= bound * max(1.0, abs(theirs)), (case, what, ours, theirs)


def same_pieces(
    model: AnyDecoder, name: str, ours: torch.Tensor, theirs: torch.Tensor, bound: float, what: Any
) -> None:
    """Compare what this rank holds with its places in the whole; ``bound`` is relative to the whole's largest."""
    limit = max(1.0, theirs.abs().max().item())
    for piece in pieces(ours, model.placements.get(name)):
        place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
        same(piece.tensor / limit, theirs[place] / limit, bound, (what, name))


def run(model: Decoder) -> torch.Tensor:
    total = model(*batch(0))
    total.backward()
    return total.detach()


def run_halved(model: Decoder) -> torch.Tensor:
    """Return the loss; the gradients of matrices are there when those of inputs all are."""
    later: list[deferral.Work] = []
    with deferral.splitting(), deferral.collecting(later):
        total = model(*batch(0))
        total.backward()
    assert all(model.get_parameter(f"layers.0.{name}.weight").grad is None for name in ("ffn.up", "attention.o"))
    for work in later:
        work()
    return total.detach()


def check_pass(case: Case, ranks: Ranks) -> None:
    """One forward and backward pass without data-parallel ranks."""
    plan, expected = case.plan(), reference(case.model)
    model = build(plan.model).double()
    apply_tensor(model, plan, ranks)
    recompute(model.layers, plan.layout.recompute)
    materialise(model, "cpu")
    shared = TensorGradients.of(model, plan, ranks)
    fill(model, Weights(), seed=4)
    perturbed(model)
    if case.chunk_logits:
        patch_loss(model, make_team(plan, ranks), case.chunk_logits)
    freeze(model, case.frozen)
    if case.compiled:
        compile_blocks(model.layers)
    with contextlib.nullcontext() if case.compiled else CommCounter() as counter:
        total = run_halved(model) if case.halved else run(model)
        if shared is not None:
            shared.add_up()
    same(total, expected["loss"], 1e-12, case)
    if counter is not None and not case.halved and not case.frozen:
        check_traffic(plan, counter.snapshot(), ranks, case)
    assert set(dict(model.named_parameters())) == set(expected["grads"])
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is not parameter.requires_grad, (case, name)
        if parameter.grad is None:
            continue
        same_pieces(model, name, parameter.grad, expected["grads"][name], 1e-12, case)


def check_stages(case: Case, ranks: Ranks) -> None:
    """The stages of a pipeline, both on each rank, one after the other."""
    plan, expected = case.plan(), reference(case.model)
    parts = build_parts(plan.model, ((0, 1), (1, 2)), (0, 1)).double()
    apply_tensor(parts, plan, ranks)
    materialise(parts, "cpu")
    shared = TensorGradients.of(parts, plan, ranks)
    fill(parts, Weights(), seed=4)
    perturbed(parts)
    tokens_BS, labels_BS = batch(0)
    handed_on = parts.stages[0](tokens_BS)
    assert handed_on.shape == (SEQUENCES, -(-LENGTH // case.tp) if plan.layout.tensor.sequence_norms else LENGTH, 13)
    total = parts.stages[1](handed_on, labels_BS)
    same(total.detach(), expected["loss"], 1e-12, case)
    total.backward()
    if shared is not None:
        shared.add_up()
    assert set(dict(parts.named_parameters())) == set(expected["grads"])
    for name, parameter in parts.named_parameters():
        assert parameter.grad is not None, (case, name)
        same_pieces(parts, name, parameter.grad, expected["grads"][name], 1e-12, case)


def check_traffic(plan: Plan, seen: dict[str, CollectiveTraffic], ranks: Ranks, case: Case) -> None:
    """Compare sent bytes with the planner's count, call by call; logits are not sent."""
    job = TrainingWork(plan.model, plan.devices, LENGTH, "fp64", global_batch=SEQUENCES)
    expected: dict[str, list[int]] = {}
    for call in tensor_calls(job, plan.layout, [0], ranks.tp.place):
        total = expected.setdefault(call.kind, [0, 0])
        total[0] += call.times
        total[1] += call.sent_bytes
    assert {kind: [traffic.calls, traffic.sent_bytes] for kind, traffic in seen.items()} == expected, case


def check_training(case: Case, ranks: Ranks) -> None:
    """Five optimizer steps and a validation."""
    plan, expected = case.plan(), reference(case.model)
    model = build(plan.model).to(MASTER_DTYPE[case.precision])
    parallelize(model, plan, ranks)
    sync = shard(model, layout=plan.layout, precision=plan.training.precision, ranks=ranks)
    materialise(model, "cpu")
    shared = TensorGradients.of(model, plan, ranks)
    fill(model, Weights(), seed=4)
    perturbed(model)
    trained = trained_parameters(model)
    optimizer = DeviceOptimizer(trained, OPTIMIZER, model.copies)
    passes = PlainPasses(model, sync, ranks.device, shared)
    stepper = Stepper(passes, optimizer, LossScaler(False), ranks=ranks, training=plan.training, spec=OPTIMIZER)
    for step in range(STEPS):
        result = stepper.step(step, micro_batches(case, step, ranks), lambda term: contextlib.nullcontext())
        close(result.loss, expected["losses"][step], case, (step, "loss"))
        close(result.grad_norm, expected["norms"][step], case, (step, "norm"))
    for name, parameter in trained.items() if case.precision == "fp64" else ():
        same_pieces(model, name, parameter.detach(), expected["weights"][name], 1e-10, case)
    validated = stepper.validate(micro_batches(case, 99, ranks))
    assert validated is not None
    close(validated[0], expected["validation"], case, "validation")


def micro_batches(case: Case, step: int, ranks: Ranks) -> list[MicroBatch]:
    tokens, labels = batch(step)
    each, place = SEQUENCES // case.dp, ranks.dp.place
    mine = slice(place * each, (place + 1) * each)
    return [
        MicroBatch(t, label)
        for t, label in zip(tokens[mine].chunk(case.accumulation), labels[mine].chunk(case.accumulation), strict=True)
    ]


def check_fused(ranks: Ranks) -> None:
    """Products fused with exchanges do what the others do; the operators' own stand-in for devices without them."""
    fused = torch.library.Library("symm_mem", "IMPL")
    fused.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    fused.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    size, place = ranks.tp.size, ranks.tp.place
    plain = Team(ranks.tensor_group.group_name, place, size, length=2 * size)
    torch.manual_seed(place)
    linears = [Linear(5, 3), Linear(5, 4, bias=False), Linear(7, 5)]
    for linear in linears:
        linear.double()
    x_BsH = torch.randn(3, 2, 5, dtype=torch.float64)
    seen = []
    for team in (plain, dataclasses.replace(plain, symmetric=True, overlap=True)):
        shares_BsH = x_BsH.clone().requires_grad_()
        products = columns(shares_BsH, linears[:2], team)
        out_BsH = row(torch.cat(products, -1).sin(), linears[2], team)
        wanted = [shares_BsH, *(p for linear in linears for p in linear.parameters())]
        seen.append([out_BsH, *torch.autograd.grad(out_BsH.cos().sum(), wanted)])
    for ours, theirs in zip(*seen, strict=True):
        same(ours.detach(), theirs.detach(), 1e-12, "fused")
    with pytest.raises(ConfigurationError, match="PT647"):
        check_symmetric(plain, torch.device("cpu"))


LAYOUTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "plain": (),
    "overlap": (("tensor_overlap", "backward"),),
    "shares": (("sequence_norms", True),),
    "shares overlap": (("sequence_norms", True), ("tensor_overlap", "backward")),
    "pieces": (("tensor_chunks", 3), ("tensor_overlap", "backward")),
    "shares pieces": (("sequence_norms", True), ("tensor_chunks", 2)),
}
POLICIES = ("attention", "selective", "full")


QUICK = {
    "mha": "overlap", "gqa": "pieces", "shared": "shares overlap", "gpt": "shares pieces", "latent": "shares overlap",
    "latent-lite": "pieces",
}  # fmt: skip


def passes(tp: int, every: bool) -> list[Case]:
    """Every model in every layout; without ``every`` only plain, on shares of the sequence, and in one layout more."""
    return [
        Case(name, tp, layout=layout)
        for name in CONFIGS
        for key, layout in LAYOUTS.items()
        if every or key in ("plain", "shares", QUICK[name])
    ]


def more_passes(tp: int, every: bool) -> list[Case]:
    """Losses in chunks, recomputation, halved passes and frozen layers, of some models."""
    layouts = [layout for key, layout in LAYOUTS.items() if every or key in ("pieces", "shares overlap")]
    found = [Case("shared", tp, layout=layout, chunk_logits=20) for layout in layouts]
    found += [
        Case(name, tp, layout=(*layout, ("recompute", (policy,) * 2)))
        for name in (("shared", "mha", "latent", "latent-lite") if every else ("mha",))
        for policy in POLICIES
        for layout in layouts
    ]
    found += [Case(name, tp, layout=layout, halved=True) for name in ("shared", "latent") for layout in layouts]
    # Also where a rank has no head and no token, exchanges must be those of the others.
    return found + [
        Case(name, tp, layout=layout, frozen=("embed.*", "layers.0.*")) for name in ("mha", "gpt") for layout in layouts
    ]


def trainings(every: bool) -> list[Case]:
    """Over four tensor ranks with each recomputation, over two with every ZeRO stage, and in bf16 with idle ranks."""
    overlap, shares = LAYOUTS["overlap"], LAYOUTS["shares overlap"]
    found = [
        Case(name, 2, dp=2, zero=zero, layout=layout, accumulation=2)
        for zero in range(4)
        for name, layout in (("shared", overlap), ("gpt", shares))
        if every or (zero % 2 == 0) is (name == "gpt")
    ]
    found.append(Case("latent", 2, dp=2, zero=3, layout=shares, accumulation=2))
    if every:
        found += [Case("latent-lite", 2, dp=2, zero=zero, layout=overlap, accumulation=2) for zero in range(4)]
        found += [Case("latent", 4, layout=(*shares, ("recompute", (policy,) * 2))) for policy in POLICIES]
        found += [Case("shared", 4, layout=shares), Case("gpt", 4)]
        found += [
            Case("gqa", 4, layout=(*layout, ("recompute", (policy,) * 2)))
            for policy in POLICIES
            for layout in (overlap, shares)
        ]
    return [*found, Case("mha", 4, zero=3), Case("mha", 4, zero=3, layout=shares, precision="bf16")]


@functools.cache
def ranks_of(tp: int) -> Ranks:
    """Return the ranks of the pool, with so many tensor ranks and the rest as replicas."""
    joined()
    world = torch.distributed.get_world_size()
    return build_ranks(Case("mha", tp, dp=world // tp).plan(), torch.device("cpu"))


def run_pass(case: Case) -> None:
    """Compare a forward and backward pass with one process."""
    check_pass(case, ranks_of(case.tp))


def run_stages(name: str, layout: str) -> None:
    """Compare the stages of a pipeline with one process."""
    ranks = ranks_of(4)
    check_stages(Case(name, 4, layout=LAYOUTS[layout]), ranks)


def run_training(case: Case) -> None:
    """Compare training with one process; the mesh of the case is its own."""
    joined()
    check_training(case, build_ranks(case.plan(), torch.device("cpu")))


def run_fused() -> None:
    """Compare fused products with plain ones."""
    joined()
    check_fused(ranks_of(torch.distributed.get_world_size()))

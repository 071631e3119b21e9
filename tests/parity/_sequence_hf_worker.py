"""Ranks of test_sequence_hf.py: models of transformers on shares of sequences, against transformers, in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from _hf_models import MODELS, plan_of
from _hf_worker import folder
from _hf_worker import written as models_written
from _own_models import OWN, own_model, own_plan, write_own
from _plans import small_plan
from _ranks import in_group

from partool.cost.traffic.sequence import sequence_bytes
from partool.layout.sequence import shares
from partool.plan.layout import Mesh
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import Weights
from partool.spec.training import LrSchedule, OptimizerSpec
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.attention import HfAttention, HfBlock, MaskStandIn
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import AnyDecoder
from partool_runtime.model.attention import AttentionLayout, Tokens
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.comm import SEQUENCE, CommCounter
from partool_runtime.parallel.sequence import ulysses
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.pieces import pieces
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.weights import fill, post_load

LENGTH, STEPS, SEQUENCES = 13, 5, 4
"""Tokens of a sequence: no number of ranks divides it."""
OPTIMIZER = OptimizerSpec(lr=0.02, weight_decay=0.1, clip=0.4, schedule=LrSchedule(warmup_steps=3))
FURTHER: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 20, "n_head": 5, "n_layer": 2, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "granite": {
        "hidden_size": 24, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3,
        "attention_multiplier": 0.3,
    },
    "falcon": {"hidden_size": 24, "num_attention_heads": 6, "multi_query": True, "parallel_attn": True, "bias": False},
    "gemma2": {
        "hidden_size": 16, "intermediate_size": 13, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "sliding_window": 3, "final_logit_softcapping": None, "attn_logit_softcapping": 2.0,
    },
    "gpt_oss": {
        "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "qwen2_deep": {
        **MODELS["qwen2"], "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3,
        "max_window_layers": 2,
    },
    "phi3_long": {
        **MODELS["phi3"], "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [3.0, 4.0], "rope_theta": 100.0,
            "original_max_position_embeddings": 8,
        },
    },
}  # fmt: skip
WIDE = ("mistral", "qwen2_deep", "gemma3_text_deep", "gemma2", "gpt_oss")
FURTHER |= {f"{name}_wide": {**(MODELS | FURTHER)[name], "sliding_window": LENGTH - 1} for name in WIDE}
FURTHER |= {f"{name}_wider": {**(MODELS | FURTHER)[name], "sliding_window": LENGTH + 1} for name in WIDE}
MODELS |= FURTHER
"""Models by name; windows of ``_wide`` ones are a little shorter than sequences, those of ``_wider`` ones longer."""


@dataclass(frozen=True)
class Case:
    model: str
    method: str = "ulysses"
    cp: int = 4
    dp: int = 1
    tp: int = 1
    pp: int = 1
    fields: tuple[tuple[str, Any], ...] = ()
    documents: bool = False
    steps: int = STEPS
    patterns: tuple[tuple[str, Any], ...] = ()

    def plan(self) -> Plan:
        base = small_plan(Path("unused"), ranks=self.cp * self.dp * self.tp * self.pp)
        settings = {"sequence_length": LENGTH, "precision": "fp64", "steps": STEPS, "global_batch": SEQUENCES}
        data = base.data.model_copy(update={"attend": "document" if self.documents else "sequence"})
        plan = base.model_copy(update={"training": base.training.model_copy(update=settings), "data": data})
        mesh = Mesh(pp=self.pp, dp_shard=self.dp, cp=self.cp, tp=self.tp)
        if self.model in OWN:
            return own_plan(plan, self.model, mesh, sequence_method=self.method, **dict(self.fields))
        return plan_of(
            plan, folder() / self.model, mesh, dict(self.patterns), sequence_method=self.method, **dict(self.fields)
        )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and documents of a step over all ranks; of a sequence's labels, the last few are all ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(31, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[0, LENGTH - 4 :] = -100
    ends = torch.rand(labels.shape, generator=generator) < 0.2
    return tokens[:, :-1], labels, ends.int().cumsum(1).int()


def loss_of(model: torch.nn.Module, step: int, documents: bool) -> torch.Tensor:
    """Sum of the token losses, from all logits that transformers computes; each document is a sequence by itself."""
    tokens, labels, numbers = batch(step)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(SEQUENCES):
        for start, stop in stretches(numbers[row]) if documents else [(0, LENGTH)]:
            logits = logits_of(model, tokens[row : row + 1, start:stop])
            part = torch.nn.functional.cross_entropy(logits[0], labels[row, start:stop], reduction="sum")
            total = total + part
    return total


def logits_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return all logits of a model of transformers, or of one of the test's own."""
    if type(model).__module__ == own_model.__module__:
        return cast(torch.Tensor, model(tokens))
    with KeepWide():
        return cast(torch.Tensor, model(input_ids=tokens, use_cache=False).logits)


def stretches(numbers: torch.Tensor) -> Iterator[tuple[int, int]]:
    starts = [0, *(numbers.diff().nonzero()[:, 0] + 1).tolist(), len(numbers)]
    return pairwise(starts)


def theirs(name: str) -> Any:
    """Return the model of transformers, or the test's own."""
    if name in OWN:
        return own_model(name, folder() / name)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder() / name), dtype=torch.float64).double()
    model.train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@functools.cache
def reference(name: str, documents: bool) -> dict[str, Any]:
    """Gradients of one step, and five training steps, of transformers' own model with torch's own optimizer."""
    model = theirs(name)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(0.9, 0.95), eps=OPTIMIZER.eps, foreach=False)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = loss_of(model, step, documents) / (batch(step)[1] != -100).sum()
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
        out["validation"] = float(loss_of(model, 99, documents)) / int((batch(99)[1] != -100).sum())
    return out


def check(case: Case) -> None:
    """Gradients of the first step, optimizer steps, and a validation."""
    plan, expected = case.plan(), reference(case.model, case.documents)
    ranks = build_ranks(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent: None)
    model = prepared.model
    trained = trained_parameters(model)
    optimizer = DeviceOptimizer(trained, OPTIMIZER, model.copies)
    fill(model, Weights(source="hf", path=str(folder() / case.model)), seed=0)
    post_load(model)
    check_gradients(case, plan, ranks, prepared)
    if not case.steps:
        return
    stepper = Stepper(
        prepared.passes, optimizer, LossScaler(False), ranks=ranks, training=plan.training, spec=OPTIMIZER
    )
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


def check_gradients(case: Case, plan: Plan, ranks: Ranks, prepared: Prepared) -> None:
    """Compare the gradients of the first step, and what the busiest rank sends for attention with what is planned."""
    weight = 1.0 / (batch(0)[1] != -100).sum().double()
    with CommCounter() as counter:
        prepared.passes.step(micro_batches(case, 0, ranks), weight, lambda term: contextlib.nullcontext())
    if case.cp > 1 and (case.tp, case.pp) == (1, 1):
        sent = torch.tensor(sum(one.sent_bytes for one in counter.snapshot(described=SEQUENCE).values()))
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        job = SimpleNamespace(model=plan.model, sequence_length=LENGTH, compute_bytes=8, perturbed=0.0, backward=True)
        assert int(sent) == sequence_bytes(cast(Any, job), plan.layout), (case, int(sent))
    for name, parameter in trained_parameters(prepared.model).items():
        whole = reference(case.model, case.documents)["grads"][name]
        ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        same_pieces(prepared.model, name, ours, whole, 1e-12, (case, "gradient"))


def close(ours: float, whole: float, what: object) -> None:
    assert abs(ours - whole) <= 1e-10 * max(1.0, abs(whole)), (what, ours, whole)


def same_pieces(model: AnyDecoder, name: str, ours: torch.Tensor, whole: torch.Tensor, bound: float, what: Any) -> None:
    """Compare what this rank holds with its places in the whole; ``bound`` is relative to the whole's largest."""
    limit = bound * max(1.0, whole.abs().max().item())
    for piece in pieces(ours, model.placements.get(name)):
        place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
        assert piece.tensor.shape == whole[place].shape, (what, name)
        error = (piece.tensor - whole[place]).abs().max().item() if piece.tensor.numel() else 0.0
        assert error <= limit, f"{what} {name}: {error} > {limit}"


def micro_batches(case: Case, step: int, ranks: Ranks) -> list[MicroBatch]:
    tokens, labels, documents = batch(step)
    each, place = SEQUENCES // case.dp, ranks.dp.place
    mine = slice(place * each, (place + 1) * each)
    parts = (x[mine].split(2) for x in (tokens, labels, documents))
    return [MicroBatch(t, label, d if case.documents else None) for t, label, d in zip(*parts, strict=True)]


def ways(**fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.items())


ZIGZAG, USP = ways(sequence_order="zigzag"), ways(sequence_order="zigzag", sequence_inner=2)
STAR = ways(sequence_order="zigzag", sequence_teams=2)
METHODS = {"ulysses": (), "ring": ZIGZAG, "usp": USP, "startrail": STAR, "all_gather": ()}
GATHERED = tuple(dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), "column_gathered").items())
HALVES = ways(schedule="1f1b", stages=((0, 2), (2, 4)), chunks=1)
QUARTERS = ways(schedule="zb-v", stages=((0, 1), (1, 2), (2, 3), (3, 4)), chunks=2)


def cases(world: int, chosen: str) -> list[Case]:
    """Return what so many ranks check: a few, or the rest."""
    if chosen == "all":
        return further(world)
    if world == 1:
        return [Case(name, cp=1, documents=True, steps=0) for name in ("gpt2", "qwen3_deep")]
    if world == 3:
        return [Case("phi3_long", "ring", cp=3, fields=ZIGZAG, steps=0), Case("mistral", "ulysses", cp=3)]
    return [
        Case("qwen3_deep", "ulysses", steps=0),
        Case("llama", "usp", fields=USP, steps=0),
        Case("gpt_neox", "startrail", fields=STAR, steps=0),
        Case("deepseek_v2", "ring", cp=2, dp=2, fields=(*ZIGZAG, *ways(zero=3)), steps=0),
        Case("qwen3_deep", "ring", cp=2, pp=2, fields=(*HALVES, *ways(zero=1)), documents=True),
        Case("gpt2", "all_gather", documents=True, steps=0),
        Case("granite", "ulysses", steps=0),  # an attention scale of its own
        Case("llama", "ulysses", cp=2, tp=2, documents=True, fields=ways(recompute=("full",) * 2), steps=0),
    ]


SHALLOW = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt_neox", "phi", "phi3", "deepseek_v2", "gpt2", "granite")


def further(world: int) -> list[Case]:
    """Return every family under every method, and all else that changes how layers run."""
    if world != 4:
        # transformers' DeepSeek-V2 of odd sizes does not take the one token of a document by itself.
        return [Case(name, "ulysses", cp=world, documents=name != "deepseek_v2") for name in SHALLOW]
    found = []
    for name in SHALLOW:
        for method, fields in METHODS.items():
            if method == "startrail" and name == "mistral":
                continue
            own = () if name == "mistral" and method == "ring" else fields
            if name == "mistral" and method == "usp":
                own = ways(sequence_inner=2)
            found.append(Case(name, method, fields=own, documents=name in ("llama", "mistral"), steps=0))
    for method, fields in METHODS.items():
        found += [Case("qwen2", method, fields=(*fields, *ways(zero=zero))) for zero in range(4)]
        for policy in ("full", "selective", "attention", "keep_attention"):
            found.append(Case("llama", method, fields=(*fields, *ways(recompute=(policy,) * 2)), steps=0))
    for method in ("ulysses", "ring", "all_gather"):
        found += [
            Case("qwen3_deep", method, cp=2, pp=2, fields=QUARTERS, documents=True),
            Case("gpt_neox_deep", method, cp=2, pp=2, fields=(*HALVES, *METHODS[method], *ways(zero=3))),
            Case("mixtral", method, cp=2, tp=2, fields=METHODS[method], steps=0),
            Case("mistral", method, cp=2, tp=2, documents=True, steps=0),
            Case("deepseek_v2", method, cp=2, tp=2, fields=METHODS[method], steps=0),
            # One tensor rank has the only head, and the other none.
            Case("mistral_single", method, cp=2, tp=2, patterns=GATHERED, steps=0),
        ]
    return found


def a_dropped_window_is_found() -> None:
    """Layers of transformers that lose their window on the way are refused, and a core that ignores it is seen."""
    with in_group():
        case = Case("mistral", cp=1, documents=True)
        plan = case.plan()
        prepared = prepare(plan, build_ranks(plan, torch.device("cpu")), lambda done, sent: None)
        model = prepared.model
        assert isinstance(model, HfDecoder)
        fill(model, Weights(source="hf", path=str(folder() / case.model)), seed=0)
        post_load(model)
        (attention,) = {
            id(value): value
            for m in model.layers[0].modules()
            for value in vars(m).values()
            if isinstance(value, HfAttention)
        }.values()
        weight, tokens = (
            torch.ones((), dtype=torch.float64),
            micro_batches(case, 0, build_ranks(plan, torch.device("cpu"))),
        )
        right = prepared.passes.step(tokens, weight, lambda term: contextlib.nullcontext())
        core = attention.core
        attention.core = lambda q, k, v, layout, tokens: core(q, k, v, AttentionLayout(None), tokens)
        wrong = prepared.passes.step(tokens, weight, lambda term: contextlib.nullcontext())
        assert abs(float(right - wrong)) > 1e-3
        attention.core, model.base.config.sliding_window = core, None
        with pytest.raises(ConfigurationError, match="window of None, and of 3") as found:
            prepared.passes.step(tokens, weight, lambda term: contextlib.nullcontext())
        assert found.value.code == "PT654"


def dropped_weights_are_those_of_one_process() -> None:
    """Under Ulysses results have the mean and variance of one process's, and each rank draws for itself."""
    with in_group():
        ranks, rank, times, heads = 4, dist.get_rank(), 200, 4
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(1, heads, LENGTH, 4, generator=generator) for _ in range(3)]
        dealt = shares(LENGTH, ranks)
        team = SequenceTeam(dist.new_group(list(range(ranks))), rank, dealt, (tuple(range(ranks)),))
        mine = torch.tensor(team.index(rank))
        shared, alone = (HfBlock(HfAttention(AttentionLayout(5))) for _ in range(2))
        base = Case("llama").plan().layout
        ulysses.put([cast(Any, shared)], team, base)
        torch.manual_seed(rank)

        def drawn(block: HfBlock, parts: list[torch.Tensor], tokens: Tokens) -> torch.Tensor:
            q, k, v = parts
            draws = [block.attention((q, k, v), MaskStandIn(5, tokens), None, 0.3, {}) for _ in range(times)]
            return torch.stack(draws)[:, 0].transpose(1, 2)

        over_ranks = drawn(shared, [x[:, :, mine] for x in whole], Tokens(LENGTH, mine))
        by_itself = drawn(alone, whole, Tokens(LENGTH))[:, :, mine]
        (mean, spread), (other, wide) = ((x.mean(0), x.var(0)) for x in (over_ranks, by_itself))
        distance = (mean - other) / ((spread + wide) / times).sqrt().clamp(min=1e-6)
        assert distance.abs().max() < 5, distance.abs().max()
        assert abs(float(spread.sum() / wide.sum()) - 1) < 0.2
        # Each rank has one head: were all to draw the same, heads would lose the same weights.
        kept = over_ranks[:, :, -1, :].std(dim=0) > 0
        assert kept.all()
        moved = over_ranks[:, :, -1, 0] - over_ranks[:, :, -1, 0].mean(0)
        related = torch.corrcoef(moved.T) - torch.eye(heads)
        assert related.abs().max() < 0.5, related


def written(name: str) -> None:
    """Write a model, further ones among them, that is not there yet."""
    if name not in OWN:
        models_written(name)
    elif not (folder() / name).exists():
        write_own(name, folder())


def check_case(case: Case) -> None:
    """Compare one case with transformers' own model."""
    with in_group():
        check(case)
    gc.collect()

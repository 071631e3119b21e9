"""Ranks of test_zero.py: trains a small model in every layout and writes what the test compares."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))
from _ranks import in_group
from layouts import new_layout
from torch import nn
from torch.distributed.tensor import DTensor

from partool.plan.layout import Mesh
from partool.spec.data import DataSpec
from partool.spec.model import ModelConfig
from partool.spec.training import KernelsSpec, LrSchedule, OptimizerSpec, TrainingSpec
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import StagedDecoder
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel import parallelize
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.parallel.passes import PlainPasses
from partool_runtime.parallel.zero import shard, trained_parameters
from partool_runtime.precision import MASTER_DTYPE, LossScaler

VOCAB, HIDDEN, WIDE, LAYERS = 13, 5, 7, 2
STEPS, SEQUENCES, LENGTH = 6, 12, 6
OPTIMIZER = OptimizerSpec(lr=0.02, weight_decay=0.1, clip=0.4, schedule=LrSchedule(warmup_steps=3))


def causal(q_BNSD: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q_BNSD, q_BNSD, q_BNSD, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = causal

    def forward(self, q_BSH: torch.Tensor) -> torch.Tensor:
        return self.core(q_BSH.unsqueeze(1)).squeeze(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, WIDE)
        self.down = nn.Linear(WIDE, HIDDEN)
        self.row = nn.Parameter(torch.empty(1, HIDDEN))  # fewer rows than ranks
        self.unused = nn.Linear(HIDDEN, 3)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        y_BSH = self.norm(x_BSH)
        y_BSH = y_BSH + self.attention(self.q(y_BSH))
        return x_BSH + self.down(F.gelu(self.up(y_BSH))) * self.row


class Model(StagedDecoder):
    """A causal model with odd sizes; no dimension divides by 2 and 3 at once, some by neither."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        return enumerate(self.layers)

    def groups(self) -> list[list[nn.Module]]:
        return [[self.embed], *([layer] for layer in self.layers), [self.final_norm, self.head]]

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        logits = F.linear(self.final_norm(x_BSH), self.head.weight).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels_BS.flatten(), reduction="sum")


@dataclass(frozen=True)
class Case:
    zero: int
    mesh: tuple[int, int]
    """Replicas and shards."""
    accumulation: int = 1
    tied: bool = False
    frozen: tuple[str, ...] = ()
    recompute: str = "none"
    compile: str = "none"
    precision: str = "fp64"
    poison_step: int = -1
    """Step in which one rank's gradient is made infinite."""
    gather: str = "coalesced"
    prefetch: int = 1
    persistent: int = 0
    leaves: tuple[str, ...] = ()


def initial_weights(tied: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    named = Model(tied=tied).named_parameters()
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4 for n, p in named}


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a step over all ranks; ignored labels make the sequences' weights uneven."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.9, SEQUENCES)[:, None]] = -100
    return tokens[:, :-1], labels


def micro_batches(step: int, case: Case, ranks: Ranks) -> list[MicroBatch]:
    tokens, labels = samples(step)
    mine = slice(ranks.rank * SEQUENCES // ranks.world_size, (ranks.rank + 1) * SEQUENCES // ranks.world_size)
    return [
        MicroBatch(t, label)
        for t, label in zip(tokens[mine].chunk(case.accumulation), labels[mine].chunk(case.accumulation), strict=True)
    ]


def plan_of(case: Case) -> Any:
    return SimpleNamespace(
        optimizer=OPTIMIZER,
        layout=new_layout(
            zero=case.zero,
            mesh=Mesh(dp_replicate=case.mesh[0], dp_shard=case.mesh[1]),
            micro_batch=1,
            accumulation=case.accumulation,
            recompute=(case.recompute,) * LAYERS,
            compile=case.compile,
            stages=((0, LAYERS),),
            gather=case.gather,
            prefetch=case.prefetch,
            persistent=case.persistent,
            leaves=case.leaves,
        ),
        model=ModelConfig(layers=LAYERS, hidden=8, ffn_hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=8),
        training=TrainingSpec(sequence_length=8, global_batch=SEQUENCES, steps=1, precision=case.precision),
        kernels=KernelsSpec(),
        data=DataSpec(source="python-stdlib"),
    )


def build(case: Case, ranks: Ranks) -> tuple[Model, DeviceOptimizer, Stepper]:
    with torch.device("meta"):
        model = Model(tied=case.tied).to(MASTER_DTYPE[case.precision])
    plan = plan_of(case)
    parallelize(model, plan, ranks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    sync = shard(model, layout=plan.layout, precision=plan.training.precision, ranks=ranks)
    model.to_empty(device="cpu")
    weights = initial_weights(case.tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):  # a frozen one below ZeRO-3
                parameter.copy_(weights[name])
                continue
            rows = weights[name].to(parameter.dtype).chunk(ranks.shard.size)
            place = ranks.shard.place
            if place < len(rows):
                parameter.to_local().copy_(rows[place])
    optimizer = DeviceOptimizer(trained_parameters(model), OPTIMIZER)
    training = TrainingSpec(steps=STEPS, precision=case.precision, max_nonfinite_steps=2)
    scaler = LossScaler(case.precision == "fp16")
    return (
        model,
        optimizer,
        Stepper(
            PlainPasses(model, sync, ranks.device), optimizer, scaler, ranks=ranks, training=training, spec=OPTIMIZER
        ),
    )


def no_timer(term: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Poison:
    """Lets one rank's loss become infinite in one step."""

    def __init__(self, model: nn.Module) -> None:
        self.active = False
        model.register_forward_hook(lambda module, args, loss: loss * torch.inf if self.active else loss)


def train(case: Case, ranks: Ranks) -> dict[str, Any]:
    model, optimizer, stepper = build(case, ranks)
    parameters = dict(model.named_parameters())
    poison = Poison(model) if case.poison_step >= 0 else None
    out: dict[str, Any] = {"losses": [], "norms": [], "skipped": []}
    for step in range(STEPS):
        if poison:
            poison.active = step == case.poison_step and ranks.rank == ranks.world_size - 1
        counter = CommCounter() if step == STEPS - 1 else contextlib.nullcontext()
        with counter:
            result = stepper.step(step, micro_batches(step, case, ranks), no_timer)
        out["losses"].append(result.loss)
        out["norms"].append(result.grad_norm)
        out["skipped"].append(result.skipped)
    assert isinstance(counter, CommCounter)
    out["calls"] = {kind: t.calls for kind, t in counter.snapshot().items()}
    out["payload_bytes"] = {kind: t.payload_bytes for kind, t in counter.snapshot().items()}
    out["validation"] = stepper.validate(micro_batches(99, case, ranks))
    out["weights"] = {name: whole(p) for name, p in parameters.items()}
    out["exp_avg"] = {name: whole(t) for name, t in optimizer.state().items()}
    return out


def in_flight(case: Case, ranks: Ranks) -> int:
    """Sums of gradients that are on their way where the last backward pass of a step ends."""
    with torch.device("meta"):
        model = Model(tied=case.tied).to(MASTER_DTYPE[case.precision])
    plan = plan_of(case)
    parallelize(model, plan, ranks)
    sync = shard(model, layout=plan.layout, precision=plan.training.precision, ranks=ranks)
    model.to_empty(device="cpu")
    batch = micro_batches(0, case, ranks)
    for index, micro in enumerate(batch):
        sync.before_micro_batch(last=index == len(batch) - 1)
        model(micro.tokens_BS, micro.labels_BS).backward()
        started = 0 if sync._overlapped is None else len(sync._overlapped._started)
        sync.after_micro_batch()
    return started


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def live_bytes(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Bytes of gradients after each micro-batch but the last, and of gathered parameters between two micro-batches."""
    model, optimizer, _ = build(case, ranks)
    sync = parallelize_again(model, case, ranks)
    shards = trained_parameters(model)
    seen: dict[str, Any] = {"gradients": [], "gathered": [], "in_forward": 0}
    batch = micro_batches(0, case, ranks)
    for index, micro in enumerate(batch):
        sync.before_micro_batch(last=index == len(batch) - 1)
        loss = model(micro.tokens_BS, micro.labels_BS)
        seen["in_forward"] = max(seen["in_forward"], gathered_bytes(model))
        loss.backward()
        sync.after_micro_batch()
        del loss
        gc.collect()
        seen["gradients"].append(gradient_bytes(model, shards))
        seen["gathered"].append(gathered_bytes(model))
    optimizer.clear_gradients()
    return seen


def fsdp_parameters(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    return [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]


def gathered_bytes(model: nn.Module) -> int:
    """Storage that gathered parameters take now beside their shards."""
    shards = {p._sharded_local_tensor.untyped_storage().data_ptr() for p in fsdp_parameters(model)}
    outputs = [t.untyped_storage() for p in fsdp_parameters(model) for t in p.all_gather_outputs]
    return sum(storage.size() for storage in outputs if storage.data_ptr() not in shards)


def gradient_bytes(model: nn.Module, shards: dict[str, nn.Parameter]) -> int:
    """Bytes of all gradients this rank holds: shards, and whole ones that wait for their reduction."""
    held = [p.grad.to_local() for p in shards.values() if p.grad is not None]
    for p in fsdp_parameters(model):
        whole_grads = (p.unsharded_accumulated_grad, getattr(p, "_unsharded_param", torch.empty(0)).grad)
        held += [g for g in whole_grads if g is not None]
    return sum(t.numel() * t.itemsize for t in held)


def parallelize_again(model: nn.Module, case: Case, ranks: Ranks) -> Any:
    from torch.distributed.fsdp import FSDPModule

    from partool_runtime.parallel.grad_sync import GradSync

    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return GradSync(modules, zero=case.zero, replicas=ranks.replicate.size)


def cases(world_size: int) -> dict[str, Case]:
    if world_size == 4:
        return {f"hybrid zero-{zero}": Case(zero, (2, 2), accumulation=3) for zero in (1, 2, 3)}
    all_ranks = (1, world_size)
    found = {f"zero-{z}": Case(z, all_ranks) for z in range(4)}
    if world_size == 3:
        return found | {f"zero-{z} k=2": Case(z, all_ranks, accumulation=2) for z in range(4)}
    found |= {f"zero-{z} k=3": Case(z, all_ranks, accumulation=3) for z in range(4)}
    found |= {f"zero-{z} copies": Case(z, (2, 1), accumulation=3) for z in (1, 2)}
    frozen = ("embed.weight", "layers.1.up.weight", "layers.0.norm.bias")
    found |= {f"zero-{z} frozen": Case(z, all_ranks, accumulation=3, frozen=frozen) for z in range(4)}
    found |= {f"zero-{z} tied": Case(z, all_ranks, accumulation=3, tied=True) for z in range(4)}
    found |= {
        f"zero-{z} {policy}": Case(z, all_ranks, accumulation=3, recompute=policy)
        for z in (1, 3)
        for policy in ("attention", "selective", "full")
    }
    found |= {f"zero-{z} poisoned": Case(z, all_ranks, poison_step=4) for z in (0, 2)}
    found |= {f"zero-{z} {p}": Case(z, all_ranks, precision=p) for z in (0, 3) for p in ("fp32", "bf16", "fp16")}
    return found


def run_case(name: str) -> dict[str, Any]:
    """Train one case, or ``compiled``; return what the tests compare."""
    torch.use_deterministic_algorithms(True)  # new memory holds NaN, which no loss may reach
    with in_group():
        world_size = torch.distributed.get_world_size()
        case = Case(3, (1, 2), compile="block") if name == "compiled" else cases(world_size)[name]
        ranks = build_ranks(plan_of(case), torch.device("cpu"))
        result = train(case, ranks)
        if name.endswith("k=3"):
            result["live"] = live_bytes(case, ranks)
            result["in_flight"] = in_flight(case, ranks)
    return result

"""A tensor-parallel step written by hand with torch's DTensor.

``parallelize_module`` around the same layers, as in https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html:
query, key and value projections share one input, whose gradient is therefore summed over ranks once; the loss is
``loss_parallel``'s, which gathers no logits; AdamW is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import ModelConfig, Weights
from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.model import Decoder
from partool_runtime.precision import MASTER_DTYPE
from partool_runtime.weights import fill


class HandWritten(nn.Module):
    """The decoder's layers with an output matrix that DTensor can shard."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        decoder = Decoder(config).to(dtype)
        fill(decoder, Weights(), seed=seed)
        assert decoder.head is not None
        self.embed, self.layers, self.norm = decoder.embed, decoder.layers, decoder.final_norm
        self.head = nn.Linear(config.hidden, config.vocab, bias=False, dtype=dtype)
        self.head.weight = decoder.head.weight
        self.contexts = decoder.contexts

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the logits, ``[B, S, V]``."""
        x_BSH = self.embed(tokens_BS)
        self.contexts.length = tokens_BS.shape[1]  # the hidden state may hold only a shard of the sequence
        context = self.contexts(x_BSH)
        for layer in self.layers:
            x_BSH = layer(x_BSH, context)
        logits: torch.Tensor = self.head(self.norm(x_BSH))
        return logits


def parallelize(model: HandWritten, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Shard the model in place; with ``sequence`` norms and residuals work on shards of the sequence."""
    stream = Shard(1) if sequence else Replicate()
    inside = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in inside}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("attention.o", "ffn.down")}
    plan["attention"] = PrepareModuleInput(
        input_layouts=(stream, None), desired_input_layouts=(Replicate(), None), use_local_output=False
    )
    plan["ffn"] = PrepareModuleInput(
        input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    norms: dict[str, ParallelStyle] = {}
    if sequence:
        norms = {name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "ffn_norm")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan | norms)
    outer: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        outer["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, outer)


def dtensor_step(plan: Plan, *, sequence: bool) -> Callable[[int, Sequence[MicroBatch]], float]:
    """Return a step of the plan's model on all ranks of the world."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = HandWritten(plan.model, plan.training.seed, MASTER_DTYPE[plan.training.precision])
    parallelize(model, mesh, sequence=sequence)
    # One optimizer per kind of tensor: the fused update accepts no mixture. Weight decay as in partool: matrices only.
    parameters = list(model.parameters())
    cut = [p for p in parameters if isinstance(p, DTensor)]
    kinds = [[p for p in cut if p.ndim >= 2], [p for p in cut if p.ndim < 2]]
    kinds.append([p for p in parameters if not isinstance(p, DTensor)])
    spec = plan.optimizer
    optimizers = [
        torch.optim.AdamW(
            kind,
            lr=spec.lr,
            betas=(spec.betas[0], spec.betas[1]),
            eps=spec.eps,
            weight_decay=spec.weight_decay if kind[0].ndim >= 2 else 0.0,
            fused=True,
        )
        for kind in kinds
        if kind
    ]

    def step(number: int, batch: Sequence[MicroBatch]) -> float:
        count = sum(int((micro.labels_BS != IGNORED_LABEL).sum()) for micro in batch)
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch:
            with loss_parallel():
                logits = model(micro.tokens_BS)
                summed = F.cross_entropy(logits.flatten(0, -2), micro.labels_BS.flatten(), reduction="sum")
                (summed / count).backward()
            total += summed.full_tensor().detach()
        _clip(kinds, spec.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * lr_factor(spec.schedule, number, plan.training.steps)
            optimizer.step()
            optimizer.zero_grad()
        return float(total) / count

    return step


def _clip(kinds: Sequence[Sequence[nn.Parameter]], limit: float) -> None:
    """Clip by the norm over all ranks."""
    norms = []
    for kind in kinds:
        if kind:
            norm = torch.nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    if total > limit:
        for kind in kinds:
            gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in kind]
            torch._foreach_mul_(gradients, float(limit / total)) if gradients else None

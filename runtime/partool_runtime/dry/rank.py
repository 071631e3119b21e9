"""Runs one rank's steps of a plan, on fake tensors or on real ones, and returns what the rank did."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.dry.record import Collective, CollectiveRecord
from partool_runtime.dry.world import alone_in, fake_tensors
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import prepare
from partool_runtime.stepping import Stepper


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What a rank did in its second step; the first one creates state that lasts."""

    rank: int
    collectives: tuple[Collective, ...]
    operators: int
    """Number of operators that ran."""
    seconds: float
    """Processor time of everything, in seconds."""


def dry_rank(plan: Plan, rank: int) -> RankTrace:
    """Execute a rank's steps on fake tensors, without the other ranks.

    Blocks are not compiled, and parts of the model that run compiled programs of the host need ``kernels.mode: torch``
    on a CPU: they read memory, which fake tensors lack.
    """
    device = torch.device("cpu") if plan.devices.backend == "cpu" else torch.device("cuda", 0)
    with alone_in(plan.layout.mesh.world_size, rank), fake_tensors() as tensors:
        return traced(plan, replace(build_ranks(plan, device), tensors=tensors))


def traced(plan: Plan, ranks: Ranks) -> RankTrace:
    """Execute two steps of a plan on ``ranks``, real or not, and return the second step's trace."""
    started_s = time.process_time()
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    with ranks.tensors():
        stepper = Stepper(
            prepared.passes,
            open_optimizer(plan, prepared, ranks),
            LossScaler(plan.training.precision == "fp16"),
            ranks=ranks,
            training=plan.training,
            spec=plan.optimizer,
            kernels=plan.kernels.mode,
        )
        batch = micro_batches(plan)
        stepper.step(0, batch, lambda term: nullcontext())
        with CollectiveRecord() as record:
            stepper.step(1, batch, lambda term: nullcontext())
    prepared.passes.close()
    seconds = time.process_time() - started_s
    return RankTrace(ranks.rank, tuple(record.collectives), record.operators, seconds)


def micro_batches(plan: Plan) -> list[MicroBatch]:
    """Return the micro-batches of a step, whose tokens are all 0."""
    shape = plan.layout.micro_batch, plan.training.sequence_length
    tokens_BS = torch.zeros(shape, dtype=torch.int64)
    documents_BL = None
    if plan.data.attend == "document":
        documents_BL = torch.zeros(shape, dtype=torch.int32)
    return [MicroBatch(tokens_BS, tokens_BS, documents_BL)] * plan.layout.derived.accumulation

"""One rank of a world whose part of a checkpoint is compared with the part that its dry run plans."""

from __future__ import annotations

import os
from dataclasses import replace

import _dry_worker as worker
import torch
from _ranks import in_group
from planned import plan_of

from partool.plan.rank_trace import CheckpointTrace, RankTrace
from partool.plan.types import Plan
from partool_runtime.dry.host import absent_host
from partool_runtime.dry.rank import checkpoint_trace
from partool_runtime.dry.world import alone_in, fake_tensors
from partool_runtime.host import HostParts
from partool_runtime.jobs.train.saving import state_of
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.preparation import prepare

CASES = worker.CASES | {
    schedule: f"tensor: 1, sequence: 1, pipeline: {{stages: {stages}, schedule: {schedule}}}"
    for schedule, stages in (("weipipe", 4), ("weipipe-zb", 2))
}
OFTEN = ("zb-v",)
"""Cases that run each time; the others belong to the longer suites."""


COPIED = ("zero 0", "hybrid shards", "weipipe-zb")
"""Cases in which other ranks hold all that rank 1 holds."""


def plan_for(name: str) -> Plan:
    """Return a case's plan."""
    return plan_of(worker.SPEC % (worker.LAYERS, worker.GRID if name == "dsp" else "", CASES[name]))


def check_case(name: str) -> RankTrace:
    """Compare the checkpoint that this rank plans with the one that its dry run plans; return a trace with it."""
    plan, rank, device = plan_for(name), int(os.environ["RANK"]), torch.device("cpu")
    with in_group():
        real = _planned(plan, build_ranks(plan, device), None)
    with alone_in(plan.layout.mesh.world_size, rank), fake_tensors() as tensors:
        dry = _planned(plan, replace(build_ranks(plan, device), tensors=tensors), absent_host(tensors))
    assert real == dry
    return RankTrace(rank=rank, vocabulary=(), order=(), operators=0, seconds=0.0, checkpoint=dry)


def _planned(plan: Plan, ranks: Ranks, host: HostParts | None) -> CheckpointTrace:
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None, host)
    with ranks.tensors():
        optimizer = open_optimizer(plan, prepared, ranks)
        found = checkpoint_trace(state_of(prepared.model, optimizer))
    optimizer.close()
    prepared.passes.close()
    prepared.memory.close()
    return found

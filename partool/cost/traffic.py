"""Collectives of one step: calls, payloads and bytes sent. Ring convention: a gather or a reduce-scatter of S bytes over
n ranks sends (n-1)/n S per rank, an all-reduce twice that (Thakur et al., IJHPCA 19(1), 2005)."""

from __future__ import annotations

from typing import Literal

from partool.cost.workload import Workload, shard_ranks, sizes_of
from partool.plan.types import Layout, Plan

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]


def collectives(work: Workload, layout: Layout, stage: int = 0) -> dict[Collective, tuple[int, int]]:
    """Return calls and input bytes per rank and step of parameter gathers and gradient reductions (no scalars).

    Input bytes are those of the tensor a rank hands in: its shard for a gather, the whole gradients for a
    reduce-scatter or an all-reduce. The root group stays gathered between forward and backward.
    """
    sizes = sizes_of(work, layout, stage)
    ranks, micro_batches = shard_ranks(layout), layout.accumulation
    trained = [size for size in sizes if size.trained_whole]
    found: dict[Collective, tuple[int, int]] = {}
    if ranks > 1:
        times = [2] * (len(sizes) - 1) + [1] if layout.zero == 3 else [1] * len(sizes)
        repeat = micro_batches if layout.zero == 3 else 1
        elements = sum(size.shard * n for size, n in zip(sizes, times, strict=True))
        found["all_gather"] = (repeat * sum(times), repeat * elements * work.compute_bytes)
        repeat = micro_batches if layout.zero >= 2 else 1
        whole = sum(size.trained_whole for size in trained)
        found["reduce_scatter"] = (repeat * len(trained), repeat * whole * work.master_bytes)
    if layout.mesh.dp_replicate > 1:
        shards = sum(size.trained_shard for size in trained)
        found["all_reduce"] = (len(trained), shards * work.master_bytes)
    return found


def expected_collectives(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return (calls, input bytes) per rank and step by kind of collective, for a plan; see :func:`collectives`."""
    return dict(collectives(workload_of(plan), plan.layout))


def workload_of(plan: Plan) -> Workload:
    """Return what a plan's equations are evaluated for."""
    return Workload(
        model=plan.model,
        devices=plan.devices,
        precision=plan.training.precision,
        sequence_length=plan.training.sequence_length,
        global_batch=plan.training.global_batch,
        steps=plan.training.steps,
        frozen=plan.frozen,
    )


def sent_bytes(work: Workload, layout: Layout) -> dict[str, int]:
    """Return bytes sent per rank and step by traffic term, ring convention."""
    found = collectives(work, layout)
    ranks, replicas = shard_ranks(layout), layout.mesh.dp_replicate
    gathered = found.get("all_gather", (0, 0))[1] * (ranks - 1)
    scattered = found.get("reduce_scatter", (0, 0))[1] * (ranks - 1) // ranks
    reduced = 2 * found.get("all_reduce", (0, 0))[1] * (replicas - 1) // replicas
    return {"gradient_sync": scattered + reduced, "parameter_gather": gathered}



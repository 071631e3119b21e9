"""What ZeRO moves: calls, payloads and bytes sent per rank and optimizer step."""

from __future__ import annotations

from partool.cost.work import Work


def traffic_bytes(work: Work) -> dict[str, int]:
    """Return the bytes one rank sends per step, by term: (n-1)/n of the whole per ring gather or scatter."""
    gather, reduce = gather_rounds(work), reduce_rounds(work)
    shards = work.layout.mesh.dp_shard
    elements = work.stage_elements
    trained = elements * work.trained_share
    ring = (shards - 1) / shards
    scattered = reduce * ring * trained * work.master_bytes
    return {
        "gradient_sync": int(scattered + replica_bytes(work)),
        "parameter_gather": int(gather * ring * elements * work.compute_bytes),
    }


def replica_bytes(work: Work) -> float:
    """Return the part of ``gradient_sync`` that goes to other replicas: each all-reduces its shard once a step."""
    mesh = work.layout.mesh
    shard = work.stage_elements * work.trained_share * work.master_bytes / mesh.dp_shard
    return 2 * (mesh.dp_replicate - 1) / mesh.dp_replicate * shard


def gather_rounds(work: Work) -> float:
    """Return how often per step all parameters are gathered: once, in ZeRO-3 for each pass of each micro-batch.

    The last group stays gathered between forward and backward in every stage.
    """
    if work.layout.zero == 0 or work.layout.mesh.dp_shard == 1:
        return 0.0
    if work.layout.zero < 3:
        return 1.0
    last = work.gathered_groups[-1] / sum(work.gathered_groups)
    return work.layout.accumulation * (2.0 - last)


def reduce_rounds(work: Work) -> int:
    """Return how often per step gradients are reduce-scattered: once, from ZeRO-2 on for each micro-batch."""
    if work.layout.mesh.dp_shard == 1:
        return 0
    return work.layout.accumulation if work.layout.zero >= 2 else 1


def gather_calls(work: Work) -> int:
    """Return the number of gathers per step; the last group is gathered once for both passes."""
    groups = len(work.gathered_groups)
    if work.layout.zero == 0 or work.layout.mesh.dp_shard == 1:
        return 0
    return groups if work.layout.zero < 3 else work.layout.accumulation * (2 * groups - 1)


def reduce_calls(work: Work) -> int:
    """Return the number of reductions per step: one per group and round, and the replicas' all-reduces."""
    replicas = 1 if work.layout.mesh.dp_replicate > 1 else 0
    return len(work.gathered_groups) * (reduce_rounds(work) + replicas)

"""What ZeRO moves: calls, payloads and bytes sent per rank and optimizer step."""

from __future__ import annotations

from partool.cost.work import Work


def traffic_bytes(work: Work) -> dict[str, int]:
    """Return the bytes one rank sends per step, by term: (n-1)/n of the whole per ring gather or scatter."""
    gather, reduce = gather_rounds(work), reduce_rounds(work)
    shards, replicas = work.layout.mesh.dp_shard, work.layout.mesh.dp_replicate
    elements = work.stage_elements
    trained = elements * work.trained_share
    ring = (shards - 1) / shards
    gradient_sync = reduce * ring * trained * work.master_bytes
    # Replicas all-reduce the shard they share, once a step.
    gradient_sync += 2 * (replicas - 1) / replicas * trained * work.master_bytes / shards
    return {
        "gradient_sync": int(gradient_sync),
        "parameter_gather": int(gather * ring * elements * work.compute_bytes),
    }


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

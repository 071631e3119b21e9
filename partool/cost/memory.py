"""Peak memory of one rank, by term. Each function is one equation; all results are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, sqrt

from partool.cost.workload import GroupSize, Workload, shard_ranks, sizes_of
from partool.plan.types import Layout, MemoryPrediction
from partool.spec.parallel import Recompute

_GIB = 2**30
_MIB = 2**20
CHUNK_LOGITS = 2**26
"""Logits the runtime's loss holds at once."""
_FRAMEWORK = {"cpu": 300 * _MIB, "cuda": _GIB, "rocm": int(1.5 * _GIB)}
# CPU: resident size of a torch process with a gloo group, 220 to 300 MiB measured. Devices: context and libraries,
# 0.5 to 1.3 GiB as nvidia-smi shows it beside the allocator.
_FRAGMENTATION = {"cpu": 0.0, "cuda": 0.05, "rocm": 0.08}
_SIGMA = {"cpu": 0.15, "cuda": 0.10, "rocm": 0.12}
# Closed forms were within 15 % of published peaks of several stacks; this runtime's own sharding is priced exactly.


def parameters_bytes(work: Workload, sizes: Sequence[GroupSize]) -> int:
    """Return this rank's shard of the master weights (all of them on a shard axis of one)."""
    return sum(size.shard for size in sizes) * work.master_bytes


def gathered_bytes(work: Workload, layout: Layout, sizes: Sequence[GroupSize]) -> int:
    """Return the compute copies at the peak: all groups for ZeRO 0 to 2; for ZeRO-3 the root and two layers.

    fp32 and fp64 on a shard axis of one need no copy: forward uses the master weights themselves.
    """
    if shard_ranks(layout) == 1 and work.compute_bytes == work.master_bytes:
        return 0
    if layout.zero < 3:
        return sum(size.whole for size in sizes) * work.compute_bytes
    layers = sorted((size.whole for size in sizes[:-1]), reverse=True)
    return (sizes[-1].whole + sum(layers[:2])) * work.compute_bytes


def gradients_bytes(work: Workload, layout: Layout, sizes: Sequence[GroupSize]) -> int:
    """Return gradients at the peak: whole and in the master type below ZeRO-2 (accumulated), shards from ZeRO-2 on.

    With a single micro-batch every group is reduced as soon as its gradients exist; then, and from ZeRO-2 on, one group
    exists whole beside the shards, in the compute type and as the master-type buffer of the reduction.
    """
    shards = sum(size.trained_shard for size in sizes) * work.master_bytes
    if shard_ranks(layout) == 1:
        return shards
    if layout.zero < 2 and layout.accumulation > 1:
        return sum(size.trained_whole for size in sizes) * work.master_bytes
    largest = max((size.trained_whole for size in sizes), default=0)
    return shards + largest * (work.compute_bytes + work.master_bytes)


def optimizer_bytes(work: Workload, layout: Layout, sizes: Sequence[GroupSize]) -> int:
    """Return AdamW's two moments of this rank's trained shard; none if they live in host memory."""
    if layout.offload_optimizer == "cpu":
        return 0
    return 2 * sum(size.trained_shard for size in sizes) * work.master_bytes


def layer_activation_bytes(work: Workload, layout: Layout, layer: int, policy: Recompute) -> int:
    """Return what one layer keeps for the backward pass of one micro-batch.

    Elements per token, with h hidden, q and k widths of queries and keys, f the feed-forward width in use:
    full keeps the input, h. selective keeps results of matrix products and attention: h + q + 2k (projections) + q
    (attention) + 2h (outputs of attention and network) + f per input projection. none keeps also norms in fp32 (2 h each way),
    rotated queries and keys, and the activation and its product.
    """
    model, mesh = work.model, layout.mesh
    tokens = layout.micro_batch * work.sequence_length / mesh.cp
    hidden = model.hidden
    query, key = model.heads * model.head_dim / mesh.tp, model.kv_heads * model.head_dim / mesh.tp
    width = _ffn_width(work, layer) / mesh.tp
    projections = 2 if model.gated else 1
    kept = float(hidden)
    if policy != "full":
        kept += query + 2 * key + query + 2 * hidden + projections * width
    if policy == "none":
        wide = 4 / work.compute_bytes if work.compute_bytes < 4 else 1.0
        kept += 2 * hidden * wide + query + key + projections * width
    statistics = 4 * model.heads / mesh.tp if policy != "full" else 0.0
    return int(tokens * (kept * work.compute_bytes + statistics))


def activations_bytes(work: Workload, layout: Layout, stage: int = 0) -> int:
    """Return what all layers of a stage keep, for the micro-batches in flight, plus one layer's working set.

    1F1B keeps ``min(m, p - i)`` micro-batches on stage i, GPipe all m (Narayanan et al., arXiv 2104.04473).
    """
    first, last = layout.stages[stage]
    kept = sum(layer_activation_bytes(work, layout, i, layout.recompute[i]) for i in range(first, last))
    stages = len(layout.stages)
    flight = layout.accumulation if layout.schedule == "gpipe" else min(layout.accumulation, stages - stage)
    working = 0
    if any(layout.recompute[i] != "none" for i in range(first, last)):
        working = layer_activation_bytes(work, layout, first, "none")
    transient = layout.micro_batch * work.sequence_length * work.model.hidden * work.compute_bytes // layout.mesh.cp
    return kept * (flight if stages > 1 else 1) + working + 2 * transient


def loss_bytes(work: Workload, layout: Layout) -> int:
    """Return logits, their fp32 copy, its log-softmax and gradient, of at most :data:`CHUNK_LOGITS` at once; hidden gradients."""
    tokens = layout.micro_batch * work.sequence_length // layout.mesh.cp
    vocab = work.model.vocab
    logits = min(tokens * vocab, max(CHUNK_LOGITS, vocab)) // layout.mesh.tp
    wide = max(4, work.compute_bytes)
    head_gradient = vocab * work.model.hidden * work.compute_bytes if tokens * vocab > CHUNK_LOGITS else 0
    return logits * (2 * work.compute_bytes + 2 * wide) + head_gradient // layout.mesh.tp


def communication_bytes(work: Workload, layout: Layout) -> int:
    """Return buffers of the communicators: about 0.4 GiB per axis on devices with a library of their own; none on gloo."""
    if work.devices.backend == "cpu":
        return 0
    mesh = layout.mesh
    axes = sum(size > 1 for size in (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, layout.expert))
    return int(0.4 * _GIB) * axes


def fit_probability(work: Workload, total_bytes: float) -> float:
    """Return the probability that the true peak stays under the device's memory, for a normal relative error."""
    sigma = _SIGMA[work.devices.backend]
    margin = (work.devices.memory_bytes / total_bytes - 1.0) / sigma
    return 0.5 * (1.0 + erf(margin / sqrt(2.0)))


def predict_memory(work: Workload, layout: Layout) -> MemoryPrediction:
    """Return the terms of the rank that needs most: the first rank of the fullest pipeline stage."""
    worst: dict[str, int] = {}
    at = 0
    for stage in range(len(layout.stages)):
        terms = _terms(work, layout, stage)
        if not worst or sum(terms.values()) > sum(worst.values()):
            worst, at = terms, stage
    total = sum(worst.values())
    return MemoryPrediction(
        rank=at * (layout.mesh.world_size // len(layout.stages)),
        terms_bytes=worst,
        total_bytes=total,
        capacity_bytes=int(work.devices.memory_bytes * (1.0 - work.headroom)),
        fit_probability=fit_probability(work, total),
    )


def _terms(work: Workload, layout: Layout, stage: int) -> dict[str, int]:
    sizes = sizes_of(work, layout, stage)
    last = stage == len(layout.stages) - 1
    terms = {
        "parameters": parameters_bytes(work, sizes),
        "gathered": gathered_bytes(work, layout, sizes),
        "gradients": gradients_bytes(work, layout, sizes),
        "optimizer": optimizer_bytes(work, layout, sizes),
        "activations": activations_bytes(work, layout, stage),
        "loss": loss_bytes(work, layout) if last else 0,
        "communication": communication_bytes(work, layout),
        "framework": _FRAMEWORK[work.devices.backend],
    }
    tensors = sum(terms.values()) - terms["framework"] - terms["communication"]
    terms["fragmentation"] = int(tensors * _FRAGMENTATION[work.devices.backend])
    return terms


def _ffn_width(work: Workload, layer: int) -> float:
    moe = work.model.moe
    if moe is None or not work.model.is_moe_layer(layer):
        return float(work.model.ffn_hidden)
    # Routing is rarely even: a tenth more tokens on the fullest rank; each expert also keeps its copy of the input.
    return 1.1 * (moe.top_k + moe.shared_experts) * (moe.ffn_hidden + work.model.hidden / 2)

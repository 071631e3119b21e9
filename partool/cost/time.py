"""Time of one optimizer step, by term. Each function is one equation; all results are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from partool.cost.flops import attention_flops, head_flops_per_token, matmul_flops_per_token, model_flops
from partool.cost.memory import CHUNK_LOGITS
from partool.cost.traffic import sent_bytes
from partool.cost.workload import Workload, on_node, shard_ranks, sizes_of
from partool.plan.types import Layout, TimePrediction

ATTENTION_EFFICIENCY = 0.56
"""Fused attention against large matrix products: about 445 of 794 TFLOPs on H100, 64 of 125 GFLOPs on a CPU core."""
_EAGER = {"none": 1.7, "block": 1.15}  # element-wise traffic without and with fusion, against the least possible
_LAUNCH_S = {"cpu": 5e-6, "cuda": 7e-6, "rocm": 9e-6}
_KERNELS = {"none": 28, "block": 14}  # per layer and forward pass
_COLLECTIVE_S = {"cpu": 4e-4, "cuda": 6e-5, "rocm": 2e-4}
_LINK_EFFICIENCY, _FABRIC_EFFICIENCY = 0.81, 0.85  # NCCL ring on H100: 365 of 450 GB/s inside a node
_STACK = {"none": 1.2, "block": 1.15}
# Eager and compiled FSDP2 against the sum of kernels, from published torchtitan and llm-foundry runs.
RELATIVE_ERROR = {"cpu": 0.35, "cuda": 0.20, "rocm": 0.30}
"""One standard deviation of the step time: published FSDP runs for devices, a few runs of this runtime for the CPU."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Forward time of one micro-batch in one layer, split by what can be recomputed apart."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    host_s: float

    @property
    def forward_s(self) -> float:
        """Forward pass: kernels, but never below the time the host needs to start them."""
        return max(self.matmul_s + self.attention_s + self.elementwise_s, self.host_s)

    def backward_s(self, recompute: str) -> float:
        """Backward pass: 2 matmul, 2.5 attention, 1.7 element-wise, plus what is recomputed."""
        kernels = 2 * self.matmul_s + 2.5 * self.attention_s + 1.7 * self.elementwise_s
        again = {"none": 0.0, "selective": self.elementwise_s, "full": self.forward_s}[recompute]
        return max(kernels, 2 * self.host_s) + again


def matmul_s(work: Workload, flops: float, width: int) -> float:
    """Return the time of matrix products: work over the achievable rate, slower where the inner width is small."""
    return flops / work.devices.achievable_flops * (1 + 192 / width)


def layer_time(work: Workload, layout: Layout, layer: int) -> LayerTime:
    """Return the forward time of one layer; element-wise work moves about 10 h elements per token through memory."""
    per_token, attention = _layer_flops(work, layer)
    mesh = layout.mesh
    tokens = layout.micro_batch * work.sequence_length / mesh.cp
    moved = 10 * work.model.hidden + 2.5 * work.model.ffn_hidden / mesh.tp
    bytes_moved = tokens * moved * work.compute_bytes * _EAGER[layout.compile]
    stack = _STACK[layout.compile] if work.devices.backend != "cpu" else 1.0
    pairs = layout.micro_batch * attention / (mesh.tp * mesh.cp)
    return LayerTime(
        matmul_s=stack * matmul_s(work, tokens * per_token / mesh.tp, work.model.hidden),
        attention_s=stack * pairs / (work.devices.achievable_flops * ATTENTION_EFFICIENCY),
        elementwise_s=stack * bytes_moved / work.devices.memory_bytes_per_s,
        host_s=_KERNELS[layout.compile] * _LAUNCH_S[work.devices.backend],
    )


def head_time(work: Workload, layout: Layout) -> tuple[float, float]:
    """Return forward and backward time of head and loss; a loss in chunks computes the logits twice more."""
    tokens = layout.micro_batch * work.sequence_length / layout.mesh.cp
    product = matmul_s(work, tokens * head_flops_per_token(work.model) / layout.mesh.tp, work.model.hidden)
    logits = tokens * work.model.vocab / layout.mesh.tp
    traffic = logits * (work.compute_bytes + 4 * max(4, work.compute_bytes)) / work.devices.memory_bytes_per_s
    again = product if tokens * work.model.vocab > CHUNK_LOGITS else 0.0
    return product + 0.5 * traffic, 2 * product + traffic + again


def ring_bytes_per_s(work: Workload, layout: Layout, axis: str, ranks: int) -> float:
    """Return the rate per rank of a ring over one axis: the link inside a node; across nodes the ranks' adapters together."""
    local = on_node(work, layout, axis)
    link = work.devices.link_bytes_per_s * _LINK_EFFICIENCY
    if ranks <= local:
        return link
    return min(link, local * work.devices.fabric_bytes_per_s * _FABRIC_EFFICIENCY)


def optimizer_s(work: Workload, layout: Layout) -> float:
    """Return norm, clipping and update: AdamW reads four and writes three values per parameter, the norm and clip three more."""
    sizes = sizes_of(work, layout)
    elements = sum(size.trained_shard for size in sizes)
    rate = work.devices.memory_bytes_per_s
    fixed = 12 * len(sizes) * _LAUNCH_S[work.devices.backend]
    return 10 * work.master_bytes * elements / rate + fixed


def predict_time(work: Workload, layout: Layout) -> TimePrediction:
    """Return the terms of one step and what follows for the whole training."""
    forward, backward = _compute(work, layout)
    stages, micro_batches = layout.mesh.pp, layout.accumulation
    sync, gather, sent = _exchange(work, layout, forward, backward)
    overhead = {"cpu": 3e-3, "cuda": 2e-3, "rocm": 2e-3}[work.devices.backend]
    terms = {
        "data": 1e-3,
        "forward": forward * micro_batches + _tensor_s(work, layout) / 2,
        "backward": backward * micro_batches + _tensor_s(work, layout) / 2,
        "gradient_sync": sync,
        "parameter_gather": gather,
        "optimizer": optimizer_s(work, layout),
        "pipeline_bubble": (stages - 1) * (forward + backward),
        "overhead": overhead,
    }
    step = sum(terms.values())
    tokens = work.global_batch * work.sequence_length
    flops = model_flops(work.model, work.sequence_length, work.global_batch)
    ranks = layout.mesh.world_size
    peak = work.devices.peak_flops
    return TimePrediction(
        terms_s=terms,
        step_time_s=step,
        tokens_per_s=tokens / step,
        model_flops=flops,
        mfu=flops / (step * peak * ranks) if peak else None,
        total_s=step * work.steps,
        device_hours=step * work.steps * ranks / 3600,
        traffic_bytes=sent,
    )


@lru_cache(maxsize=4096)
def _layer_flops(work: Workload, layer: int) -> tuple[int, int]:
    return matmul_flops_per_token(work.model, layer), attention_flops(work.model, layer, work.sequence_length)


def _compute(work: Workload, layout: Layout) -> tuple[float, float]:
    """Return forward and backward time of one micro-batch on the slowest pipeline stage."""
    worst = (0.0, 0.0)
    for index, (first, last) in enumerate(layout.stages):
        forward = backward = 0.0
        for (policy, time), number in _distinct(work, layout, first, last).items():
            forward += number * time.forward_s
            backward += number * time.backward_s(policy)
        if index == len(layout.stages) - 1:
            head_forward, head_backward = head_time(work, layout)
            forward, backward = forward + head_forward, backward + head_backward
        if forward + backward > sum(worst):
            worst = (forward, backward)
    return worst


def _distinct(work: Workload, layout: Layout, first: int, last: int) -> dict[tuple[str, LayerTime], int]:
    """Count layers of equal policy and time, so that a deep model costs no more than a shallow one."""
    times: dict[tuple[bool, str], LayerTime] = {}
    found: dict[tuple[str, LayerTime], int] = {}
    for layer in range(first, last):
        kind = work.model.is_moe_layer(layer), work.model.attention_kind(layer)
        if kind not in times:
            times[kind] = layer_time(work, layout, layer)
        key = layout.recompute[layer], times[kind]
        found[key] = found.get(key, 0) + 1
    return found


def _exchange(
    work: Workload, layout: Layout, forward: float, backward: float
) -> tuple[float, float, dict[str, int]]:
    """Return exposed gradient reduction, exposed gathers, and the bytes sent.

    On devices 80 % of the compute beside a transfer hides it, and 5 % of a transfer always shows (the first gather, the last
    reduction); on a CPU the transfer needs the cores itself and hides behind nothing.
    """
    sent = sent_bytes(work, layout)
    latency = _COLLECTIVE_S[work.devices.backend]
    groups, micro_batches = len(sizes_of(work, layout)), layout.accumulation
    axis = "dp_shard" if shard_ranks(layout) > 1 else "dp_replicate"
    ranks = max(shard_ranks(layout), layout.mesh.dp_replicate if axis == "dp_replicate" else 1)
    rate = ring_bytes_per_s(work, layout, axis, ranks)
    if layout.mesh.dp_replicate > 1 and axis == "dp_shard":
        rate = min(rate, ring_bytes_per_s(work, layout, "dp_replicate", layout.mesh.dp_replicate) * shard_ranks(layout))
    reductions = micro_batches if layout.zero >= 2 else 1
    gathers = 2 * micro_batches if layout.zero == 3 else 1
    sync = sent["gradient_sync"] / rate + (latency * groups * reductions if sent["gradient_sync"] else 0.0)
    gather = sent["parameter_gather"] / rate + (latency * groups * gathers if sent["parameter_gather"] else 0.0)
    if work.devices.backend == "cpu":
        return sync, gather, sent
    beside_sync = 0.8 * backward * reductions
    beside_gather = 0.8 * (forward * gathers / 2 + backward * gathers / 2 if layout.zero == 3 else forward)
    if layout.zero == 3:  # gathers of the backward pass compete with its reductions for the same links
        beside_sync, beside_gather = beside_sync / 2, beside_gather * 0.75
    return max(0.05 * sync, sync - beside_sync), max(0.05 * gather, gather - beside_gather), sent


def _tensor_s(work: Workload, layout: Layout) -> float:
    """Return collectives of tensor, sequence and expert parallelism per step: none of them overlaps."""
    mesh, moe = layout.mesh, work.model.moe
    tokens = layout.micro_batch * work.sequence_length / mesh.cp * layout.accumulation
    block = tokens * work.model.hidden * work.compute_bytes * work.model.layers / mesh.pp
    total = 0.0
    if mesh.tp > 1:
        total += 8 * (mesh.tp - 1) / mesh.tp * block / ring_bytes_per_s(work, layout, "tp", mesh.tp)
    if mesh.cp > 1:
        total += 8 / mesh.cp * block / ring_bytes_per_s(work, layout, "cp", mesh.cp)
    if layout.expert > 1 and moe is not None:
        total += 4 * moe.top_k * block / ring_bytes_per_s(work, layout, "dp_shard", layout.expert)
    return total

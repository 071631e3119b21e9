"""Time of one optimizer step, by term."""

from __future__ import annotations

from partool.cost import compute
from partool.cost.traffic import gather_calls, reduce_calls, traffic_bytes
from partool.cost.work import Work
from partool.layout.mesh import ranks_on_a_node
from partool.plan.terms import TIME_TERMS
from partool.plan.types import TimePrediction

RELATIVE_ERROR = {"cpu": 0.3, "cuda": 0.2, "rocm": 0.25}
"""One standard deviation of the step time without calibration. Published equations of this kind are 14 to 20 % optimistic
on FSDP stacks; a CPU shares its cores and memory bandwidth with whatever else runs."""
_LATENCY_S = {"cpu": 300e-6, "cuda": 30e-6, "rocm": 60e-6}
"""Start of one collective."""
_REDUCE_SLOWDOWN = {"cpu": 1.7, "cuda": 1.0, "rocm": 1.0}
"""Of reductions against gathers of the same bytes: gloo adds on the core that also sends (1.7 to 1.9 measured)."""
_WAIT = {"cpu": 0.12, "cuda": 0.0, "rocm": 0.0}
"""Share of a pass that a rank waits at collectives for others on the same cores; accelerators' is in :data:`_STACK`."""
_OVERLAP = {"cpu": 0.0, "cuda": 0.85, "rocm": 0.8}
"""Share of communication that can run beside compute; gloo's work competes with compute for the same cores."""
_STACK = {"none": 1.2, "block": 1.15}
"""Derating of eager and of compiled FSDP2 against tuned code bases."""
_OVERHEAD_S = {"cpu": 4e-3, "cuda": 1e-3, "rocm": 1e-3}
"""Counting labels over all ranks, logging, checks; on a CPU with the wait for the slowest rank."""
_TENSOR_COLLECTIVES_PER_LAYER = 4


def predict_time(work: Work) -> TimePrediction:
    """Return the predicted time and traffic of one optimizer step on the slowest rank."""
    k = work.layout.accumulation
    backend = work.devices.backend
    stack = 1.0 if backend == "cpu" else _STACK[work.layout.compile]
    forward, backward = k * compute.forward_s(work) * stack, k * compute.backward_s(work) * stack
    forward += k * _tensor_s(work) / 2
    backward += k * _tensor_s(work) / 2
    traffic = traffic_bytes(work)
    shards = work.layout.mesh.dp_shard if work.layout.zero else 1
    terms = {
        "data": 1e-4,
        "forward": forward,
        "backward": backward,
        "gradient_sync": _exposed(
            work, traffic["gradient_sync"] * _REDUCE_SLOWDOWN[backend], reduce_calls(work), backward
        )
        + _wait_s(work, backward if traffic["parameter_gather"] else forward + backward),
        "parameter_gather": _exposed(work, traffic["parameter_gather"], gather_calls(work), forward)
        + (_wait_s(work, forward) if traffic["parameter_gather"] else 0.0),
        "optimizer": compute.optimizer_s(work, work.stage_elements * work.trained_share / shards),
        "pipeline_bubble": _bubble(work, (forward + backward) / k),
        "overhead": _OVERHEAD_S[backend],
    }
    step_s = sum(terms.values())
    tokens = work.training.global_batch * work.training.sequence_length
    flops = compute.model_flops(work)
    world, peak = work.layout.mesh.world_size, work.devices.peak_flops
    total_s = step_s * work.training.steps
    return TimePrediction(
        terms_s={name: terms[name] for name in TIME_TERMS},
        step_time_s=step_s,
        tokens_per_s=tokens / step_s,
        model_flops=flops,
        mfu=flops / (step_s * peak * world) if peak else None,
        total_s=total_s,
        device_hours=total_s * world / 3600.0,
        traffic_bytes=traffic,
    )


def _exposed(work: Work, sent_bytes: float, calls: float, compute_s: float) -> float:
    """Return the part of communication that compute does not hide."""
    if not sent_bytes:
        return 0.0
    backend = work.devices.backend
    whole = sent_bytes / _bytes_per_s(work) + calls * _LATENCY_S[backend]
    hidden = min(whole, compute_s) * _OVERLAP[backend]
    return whole - hidden


def _wait_s(work: Work, compute_s: float) -> float:
    """Return how long a rank waits for the others at the collectives that follow its passes."""
    return _WAIT[work.devices.backend] * compute_s if work.layout.mesh.dp > 1 else 0.0


def _bytes_per_s(work: Work) -> float:
    """Return the rate of the data-parallel ring: the link inside a node, else the fabric."""
    mesh, devices = work.layout.mesh, work.devices
    sizes = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    inside = ranks_on_a_node("dp_shard", sizes, devices.per_node) >= mesh.dp_shard
    alone = mesh.dp_replicate == 1 or mesh.world_size <= devices.per_node
    return devices.link_bytes_per_s if inside and alone else min(devices.fabric_bytes_per_s, devices.link_bytes_per_s)


def _tensor_s(work: Work) -> float:
    """Return the seconds of tensor parallelism's all-reduces per micro-batch, both passes (arXiv 1909.08053)."""
    t = work.layout.mesh.tp
    if t == 1:
        return 0.0
    each = 2 * (t - 1) / t * work.tokens_per_micro_batch * work.model.hidden * work.compute_bytes
    inside = t <= work.devices.per_node
    rate = work.devices.link_bytes_per_s if inside else work.devices.fabric_bytes_per_s
    count = _TENSOR_COLLECTIVES_PER_LAYER * work.model.layers / work.layout.mesh.pp
    return count * (each / rate + _LATENCY_S[work.devices.backend])


def _bubble(work: Work, micro_s: float) -> float:
    """Return the idle time of GPipe and 1F1B: stages - 1 micro-batches (arXiv 2104.04473, section 2.2)."""
    return (work.layout.mesh.pp - 1) * micro_s

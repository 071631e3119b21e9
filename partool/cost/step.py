"""Time of one optimizer step, by term."""

from __future__ import annotations

from partool.cost import compute
from partool.cost.traffic import gather_calls, reduce_calls, replica_bytes, traffic_bytes
from partool.cost.work import Work
from partool.plan.terms import TIME_TERMS
from partool.plan.types import TimePrediction

RELATIVE_ERROR = {"cpu": 0.3, "cuda": 0.25, "rocm": 0.3}
"""One standard deviation of the step time without calibration. Against published FSDP2 runs of Llama 3 8B on H100
and A100 the equations are 0 to 31 % optimistic; a CPU shares its cores and memory with whatever else runs."""
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
        "gradient_sync": _gradient_s(work, traffic["gradient_sync"], backward)
        + _wait_s(work, backward if traffic["parameter_gather"] else forward + backward),
        "parameter_gather": _gather_s(work, traffic["parameter_gather"], forward)
        + (_wait_s(work, forward + backward * (work.layout.zero == 3)) if traffic["parameter_gather"] else 0.0),
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
        terms_s={name: terms.get(name, 0.0) for name in TIME_TERMS},
        step_time_s=step_s,
        tokens_per_s=tokens / step_s,
        model_flops=flops,
        mfu=flops / (step_s * peak * world) if peak else None,
        total_s=total_s,
        device_hours=total_s * world / 3600.0,
        traffic_bytes=traffic,
    )


def _gradient_s(work: Work, sent_bytes: float, backward_s: float) -> float:
    """Return the exposed time of reductions: within a shard group at its rate, between replicas at theirs."""
    backend, mesh = work.devices.backend, work.layout.mesh
    between = replica_bytes(work)
    whole = (sent_bytes - between) / _rate(work, mesh.dp_shard) + between / _rate(work, mesh.dp)
    return _exposed(work, whole * _REDUCE_SLOWDOWN[backend] + reduce_calls(work) * _LATENCY_S[backend], backward_s)


def _gather_s(work: Work, sent_bytes: float, forward_s: float) -> float:
    """Return the exposed time of parameter gathers."""
    whole = sent_bytes / _rate(work, work.layout.mesh.dp_shard)
    return _exposed(work, whole + gather_calls(work) * _LATENCY_S[work.devices.backend], forward_s)


def _exposed(work: Work, whole_s: float, compute_s: float) -> float:
    """Return the part of communication that compute does not hide."""
    return whole_s - min(whole_s, compute_s) * _OVERLAP[work.devices.backend]


def _wait_s(work: Work, compute_s: float) -> float:
    """Return how long a rank waits for the others at the collectives that follow its passes."""
    return _WAIT[work.devices.backend] * compute_s if work.layout.mesh.dp > 1 else 0.0


def _rate(work: Work, group: int) -> float:
    """Return the bytes per second of a ring over ``group`` ranks: the link inside a node, else the network."""
    mesh, devices = work.layout.mesh, work.devices
    if group * mesh.cp * mesh.tp <= devices.per_node:
        return devices.link_bytes_per_s
    return min(devices.fabric_bytes_per_s, devices.link_bytes_per_s)


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

"""Exact time of one layout, from its stages, its schedule and its slowest rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from partool.cost.codec import encode
from partool.cost.collective import all_reduce_s, axis_group, send_s
from partool.cost.kinds import Kind, kinds
from partool.cost.time.attention import keys_seen
from partool.cost.time.layer import Layer
from partool.cost.time.layer_pass import LayerPass
from partool.cost.time.pipeline import (
    messages,
    moves_weights,
    sent_bytes,
    span_s,
    stage_elements,
    stages_of_ranks,
    worked_by_ranks,
)
from partool.cost.training.micro import COMMUNICATION, Micro, UnitSeconds, micro
from partool.cost.training.slowest import RankWork, slowest
from partool.cost.training.step import StepParts, step
from partool.cost.training.sync import PassSeconds, RankParameters, pipeline_wait
from partool.cost.training.traffic import exchanges, traffic_bytes
from partool.layout.parameters import is_frozen, parameters
from partool.plan.layout import Layout
from partool.plan.terms import TIME_PARTS, TIME_TERMS
from partool.plan.types import TimePrediction
from partool.schedule import StageTimes
from partool.schedule.simulate import idle_share
from partool.spec.model import ModelConfig
from partool.spec.parallel import Recompute
from partool.work.training import TrainingWork


@lru_cache(maxsize=16)
def matmul_flops_per_token(model: ModelConfig, frozen: tuple[str, ...] | None = None) -> float:
    """Return the forward FLOPs of matrix products per token: 2 per weight, without embeddings and inactive experts.

    With ``frozen``, return those of the matrices that these patterns match.
    """
    tied = model.tied_embeddings and (frozen is None or is_frozen("embed.weight", frozen))
    heads = 1 + model.predictions
    total = 2.0 * heads * model.vocab * model.hidden if tied else 0.0
    for info in parameters(model):
        if frozen is not None and not is_frozen(info.name, frozen):
            continue
        if info.kind in ("embedding", "position", "norm") or len(info.shape) < 2:
            continue
        moe = None if info.kind != "expert" or info.layer is None else model.of_layer(info.layer).moe
        share = 1.0 if moe is None else moe.top_k / moe.experts
        total += 2.0 * share * info.elements * (heads if info.kind == "head" else 1)
    return total


@lru_cache(maxsize=64)
def attention_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the forward FLOPs of attention scores and values per token, causal or in a window."""
    query = value = float(model.heads * model.head_dim)
    if model.mla:
        query = float(model.heads * (model.mla.nope_head_dim + model.mla.rope_head_dim))
        value = float(model.heads * model.mla.v_head_dim)
    return sum(2.0 * _keys(model, sequence_length, kind) * (query + value) for kind in kinds(model))


def _keys(model: ModelConfig, sequence_length: int, kind: Kind) -> float:
    if kind.axis and model.grid:
        return keys_seen(model.grid[1] if kind.axis == "row" else model.grid[0], None)
    return keys_seen(sequence_length, kind.window)


def model_flops(job: TrainingWork) -> float:
    """Return the FLOPs of one step over all ranks, without recomputation.

    Backward passes have those of gradients of inputs, as many as the forward pass, and those of trained matrices.
    """
    tokens = job.global_batch * job.sequence_length
    products = matmul_flops_per_token(job.model)
    attention = attention_flops_per_token(job.model, job.sequence_length)
    if not job.backward:
        return tokens * (products + attention)
    frozen = matmul_flops_per_token(job.model, job.frozen) if job.frozen else 0.0
    return tokens * (3.0 * (products + attention) - frozen)


CPU_ERROR = 0.3
"""Relative error of the predicted step time on a CPU without calibration, from runs on two machines with two cores."""
DATA_S = 1e-4
"""Seconds of a step in which the data loader hands over a batch."""


@dataclass(frozen=True)
class Stages:
    """Seconds and parameters of each stage, per micro-batch."""

    units: tuple[tuple[UnitSeconds, ...], ...]
    """Costs of the parts of each stage: embedding, layers, head."""

    def total(self, name: str) -> list[float]:
        """Return the sum of the field ``name`` over the units of each stage."""
        return [float(sum(getattr(unit, name) for unit in stage)) for stage in self.units]

    def exposed(self, name: str) -> list[float]:
        """Return the exposed seconds of one kind of communication per stage."""
        return [float(sum(unit.exposed[name] for unit in stage)) for stage in self.units]


def time_terms(job: TrainingWork, layout: Layout) -> dict[str, float]:
    """Return the predicted seconds of one optimizer step on the slowest rank, by time term."""
    terms = _terms(job, layout, step(job, encode(layout)), _stages(job, layout, _costs(job, layout)))
    return {name: job.time_scalar * terms.get(name, 0.0) for name in TIME_TERMS}


def predict_time(
    job: TrainingWork, layout: Layout, training_steps: int, terms: dict[str, float] | None = None
) -> TimePrediction:
    """Return the predicted time and traffic of one optimizer step on the slowest rank, and of the whole training.

    ``terms`` is what :func:`time_terms` has returned for the layout; None if it has not been called.
    """
    costs = _costs(job, layout)
    base = step(job, encode(layout))
    terms = time_terms(job, layout) if terms is None else terms
    step_s = sum(terms.values())
    tokens = job.global_batch * job.sequence_length
    flops = model_flops(job)
    peak, world = job.devices.peak_flops, layout.mesh.world_size
    total_s = step_s * training_steps
    return TimePrediction(
        terms_s=terms,
        breakdown_s=_parts(job, layout, base, costs),
        step_time_s=step_s,
        tokens_per_s=tokens / step_s,
        model_flops=flops,
        mfu=flops / (step_s * peak * world) if peak else None,
        total_s=total_s,
        device_hours=total_s * world / 3600.0,
        traffic_bytes=traffic_bytes(job, layout),
        exchanges=exchanges(job, layout),
    )


def stage_times(job: TrainingWork, layout: Layout) -> StageTimes:
    """Return the seconds of each stage per micro-batch, and of a transfer, as used by :func:`predict_time`."""
    times = _times(job, layout, step(job, encode(layout)), _stages(job, layout, _costs(job, layout)))
    scale = job.time_scalar
    forward, backward, weight = (
        [scale * value for value in stages_s] for stages_s in (times.forward_s, times.backward_s, times.weight_s or ())
    )
    send, gradient = (None if one is None else scale * float(one) for one in (times.send_s, times.gradient_send_s))  # type: ignore[arg-type]
    return StageTimes(forward, backward, weight, send or 0.0, gradient_send_s=gradient)


def pipeline_idle_share(job: TrainingWork, layout: Layout) -> float:
    """Return the share of the passes' time in which pipeline ranks do not compute, on average over the ranks.

    The time term ``pipeline_bubble`` is the idle time of the busiest rank alone: stages that differ make other ranks
    idle for longer. See :func:`partool.schedule.simulate.idle_share`.
    """
    times = stage_times(job, layout)
    per_stage = [forward + backward for forward, backward in zip(times.forward_s, times.backward_s, strict=True)]
    busy = [layout.derived.accumulation * busy_s for busy_s in worked_by_ranks(layout, per_stage)]
    return idle_share(busy, span_s(layout, times, backward=job.backward))


def _costs(job: TrainingWork, layout: Layout) -> dict[Recompute, Micro]:
    """Return the cost of a micro-batch under each recompute policy that at least one layer follows."""
    # Where ranks pass weights on, the last stage's backward pass directly follows its forward pass: no recomputation.
    more: tuple[Recompute, ...] = ("none",) if moves_weights(layout) else ()
    return {policy: micro(job, encode(layout, policy)) for policy in dict.fromkeys((*layout.recompute, *more))}


def _stages(job: TrainingWork, layout: Layout, costs: dict[Recompute, Micro]) -> Stages:
    stages = []
    of_layer = kinds(job.model)
    any_cost = next(iter(costs.values()))
    ring, last = moves_weights(layout), len(layout.pipeline.bounds) - 1
    for index, (start, stop) in enumerate(layout.pipeline.bounds):
        policies = ["none" if ring and index == last else layout.recompute[at] for at in range(start, stop)]
        units = [costs[policy].layers[of_layer[at]] for at, policy in zip(range(start, stop), policies, strict=True)]
        if index == 0:
            units.insert(0, any_cost.first)
        if index == last:
            units.append(any_cost.last)
        stages.append(tuple(units))
    return Stages(tuple(stages))


def _terms(job: TrainingWork, layout: Layout, base: StepParts, stages: Stages) -> dict[str, float]:
    """Return seconds by time term: the busiest rank's passes, the schedule's idle time, and work after the passes."""
    m, pp = layout.derived.accumulation, layout.mesh.pp
    forward, backward = stages.total("forward_s"), stages.total("backward_s")
    f_rank, b_rank = worked_by_ranks(layout, forward), worked_by_ranks(layout, backward)
    busiest = int(np.argmax(np.array(f_rank) + np.array(b_rank)))
    busy = m * (f_rank[busiest] + b_rank[busiest])
    span = busy
    if pp > 1:
        span = max(busy, span_s(layout, _times(job, layout, base, stages), backward=job.backward))
    comm = {name: m * worked_by_ranks(layout, stages.exposed(name))[busiest] for name in COMMUNICATION}
    before = m * worked_by_ranks(layout, stages.total("exposed_forward_s"))[busiest]
    summed = np.array(worked_by_ranks(layout, stages.total("summed")))
    ranks = RankWork(_parameters(layout, stages), PassSeconds(np.array(f_rank), np.array(b_rank)), summed)
    outside = slowest(job, encode(layout), base, ranks)
    slowdown_s = float(outside.slowdown_s)
    return {
        "data": DATA_S,
        "forward": m * f_rank[busiest] - before + (0.0 if job.backward else slowdown_s),
        "backward": m * b_rank[busiest] - (sum(comm.values()) - before) + slowdown_s if job.backward else 0.0,
        "gradient_sync": float(outside.gradient_s) + _outer_sync_s(job, layout, stages),
        "parameter_gather": float(outside.gather_s),
        **comm,
        "tensor_parallel": comm["tensor_parallel"] + float(outside.tensor_s),
        "offload": float(outside.offload_s),
        "optimizer": float(outside.optimizer_s),
        "pipeline_bubble": span - busy + float(pipeline_wait(job, encode(layout))) * busy,
        "overhead": job.stack.overhead_s,
    }


def _times(job: TrainingWork, layout: Layout, base: StepParts, stages: Stages) -> StageTimes:
    """Return the seconds of stages and of transfers between ranks, for the schedule."""
    forward, backward, weight = (stages.total(name) for name in ("forward_s", "backward_s", "weight_s"))
    if not moves_weights(layout):
        return StageTimes(forward, backward, weight, float(base.send_s))
    # All stages get the time of the largest stage.
    largest, stride = max(stage_elements(job, layout)), layout.mesh.world_size // layout.mesh.pp
    weights_s, gradients_s = (
        float(send_s(job, largest * size, stride)) for size in (job.compute_bytes, job.master_bytes)
    )  # fmt: skip
    return StageTimes(forward, backward, weight, weights_s, gradient_send_s=gradients_s)


def _outer_sync_s(job: TrainingWork, layout: Layout, stages: Stages) -> float:
    """Return the seconds in which a ring's ranks, which all have embedding and head, sum the gradients of both."""
    if not moves_weights(layout):
        return 0.0
    elements = float(stages.units[0][0].dense + stages.units[-1][-1].dense)
    return float(all_reduce_s(job, elements * job.master_bytes, axis_group(job, encode(layout), "pp")))


def _parameters(layout: Layout, stages: Stages) -> RankParameters:
    """Return each pipeline rank's number of parameters outside experts, of parameters in experts, and of groups."""
    ring, end = moves_weights(layout), len(stages.units) - 1
    inner = [
        units[int(ring and at == 0) : len(units) - int(ring and at == end)] for at, units in enumerate(stages.units)
    ]
    # Where weights are sent around the ring, every rank has the embedding and the head.
    outer = stages.units[0][0].dense + stages.units[end][-1].dense if ring else 0.0
    ranks = [
        (
            outer + sum(unit.dense for stage in mine for unit in inner[stage]),
            sum(unit.expert for stage in mine for unit in inner[stage]),
            2 * ring + sum(len(inner[stage]) for stage in mine),
        )
        for mine in stages_of_ranks(layout)
    ]
    dense, expert, groups = np.array(ranks, dtype=float).T
    return RankParameters(dense, expert, groups)


def _parts(job: TrainingWork, layout: Layout, base: StepParts, costs: dict[Recompute, Micro]) -> dict[str, float]:
    """Return the seconds of each of ``TIME_PARTS``, by name, averaged over pipeline ranks."""
    share = layout.derived.accumulation / layout.mesh.pp
    parts = dict.fromkeys(TIME_PARTS, 0.0)
    for (policy, kind), layers in Counter(zip(layout.recompute, kinds(job.model), strict=True)).items():
        _add_layer(parts, job, costs[policy].passes[kind], share * layers)
    head = base.micro.last
    parts["head"] = layout.derived.accumulation * float(head.both_s)
    parts["gradient_sync"], parts["parameter_gather"] = float(base.sync.gradient_s), float(base.sync.gather_s)
    if layout.mesh.pp > 1:
        stride = layout.mesh.world_size // layout.mesh.pp
        sent_s = messages(job, layout) * float(base.send_s)
        if moves_weights(layout):
            sent_s = float(send_s(job, sent_bytes(job, layout, job.master_bytes), stride))
        parts["pipeline_transfer"] = sent_s
    parts["host_transfer"] = float(base.offload.transfer_s)
    parts["host_optimizer"] = float(base.offload.optimizer_s)
    parts["disk"] = float(base.offload.disk_s)
    return {name: job.time_scalar * value for name, value in parts.items()}


def _add_layer(parts: dict[str, float], job: TrainingWork, costs: Layer, share: float) -> None:
    for suffix, one in (("forward", costs.forward), ("backward", costs.backward)):
        parts[f"matmul_{suffix}"] += share * float(one.matmul_s)
        parts[f"attention_{suffix}"] += share * float(one.attention_s)
        parts[f"elementwise_{suffix}"] += share * float(one.elementwise_s)
    parts["recompute"] += share * float(costs.recompute.total_s(job))
    for one in (costs.forward, costs.backward, costs.recompute):
        parts["launch"] += share * _launch_s(job, one)
        parts["tensor_parallel"] += share * float(one.tensor_s)
        parts["sequence_parallel"] += share * float(one.sequence_s)
        parts["expert_parallel"] += share * float(one.expert_s)


def _launch_s(job: TrainingWork, one: LayerPass) -> float:
    return float(one.total_s(job) - one.device_s)

"""Calls and bytes of ZeRO per rank and optimizer step, and all terms of traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from partool.cost.codec import encode
from partool.cost.kinds import layer_places
from partool.cost.memory.stacks import memory_stack
from partool.cost.tensor_shares import share_columns
from partool.cost.time.pipeline import moves_weights, sent_bytes, stages_of_ranks
from partool.cost.traffic.expert import expert_bytes
from partool.cost.traffic.sequence import sequence_bytes
from partool.cost.training.gathers import controls_of_layout, kept_elements, messages_of_unit
from partool.cost.training.one_bit import exchange_bytes
from partool.cost.training.optimizer import matrix_bytes, norm_bytes
from partool.cost.training.tensor_sums import tensor_bytes
from partool.layout.parameters import ParameterInfo, groups, is_frozen, parameters
from partool.layout.quantised import FewBits, weighed
from partool.plan.layout import Layout
from partool.plan.teaching import layout_of_teacher
from partool.plan.types import ExchangePart
from partool.spec.model import ModelConfig
from partool.work.evaluation import forward_only
from partool.work.training import TrainingWork


@dataclass(frozen=True)
class ZeroTraffic:
    """Calls and bytes of ZeRO's collectives per optimizer step, for the pipeline rank with the most parameters."""

    gather_calls: int
    reduce_calls: int
    gather_bytes: float
    scatter_bytes: float
    """Bytes that a rank sends to reduce gradients within a shard group."""
    replica_bytes: float
    """Bytes that a rank sends once a step to all-reduce its shard of gradients between replicas; where ranks pass
    weights around a ring, also the bytes to sum the gradients of embedding and head."""


def traffic_bytes(job: TrainingWork, layout: Layout) -> dict[str, int]:
    """Return the bytes one rank sends per step, by term of :data:`partool.plan.terms.TRAFFIC_TERMS`."""
    if job.reference_passes:
        return _with_reference(job, layout)
    if job.teacher is not None:
        return _with_teacher(job, job.teacher, layout)
    zero = traffic(job, layout)
    reduced = zero.scatter_bytes + zero.replica_bytes
    if job.one_bit is not None:
        reduced = sum(part.steps * part.sent_bytes for part in exchanges(job, layout).values()) / job.one_bit.total
    return {
        "gradient_sync": int(reduced),
        "parameter_gather": int(zero.gather_bytes),
        "pipeline": sent_bytes(job, layout, job.master_bytes),
        "tensor": tensor_bytes(job, layout),
        "sequence": sequence_bytes(job, layout, 1.0 + job.perturbed),
        "expert": expert_bytes(job, layout),
        "optimizer": int(matrix_bytes(job, encode(layout)) + norm_bytes(job, encode(layout))),
    }


def _with_reference(job: TrainingWork, layout: Layout) -> dict[str, int]:
    """Return the bytes of a step with those of a reference's forward passes; below ZeRO-3 these gather nothing."""
    training = traffic_bytes(replace(job, reference_passes=0), layout)
    reference = traffic_bytes(forward_only(job), layout)
    if layout.data.zero < 3:
        reference["parameter_gather"] = 0
    return {term: sent + job.reference_passes * reference[term] for term, sent in training.items()}


def _with_teacher(job: TrainingWork, teacher: TrainingWork, layout: Layout) -> dict[str, int]:
    """Return the bytes of a step with those of a teacher's forward passes, as the mean of all steps."""
    training = traffic_bytes(replace(job, teacher=None), layout)
    forward = traffic_bytes(teacher, layout_of_teacher(layout, teacher.model))
    if layout.data.zero < 3:
        forward["parameter_gather"] = 0
    return {term: sent + int(job.taught * forward[term]) for term, sent in training.items()}


def exchanges(job: TrainingWork, layout: Layout) -> dict[str, ExchangePart]:
    """Return how many steps are of each kind and what a rank sends in one; empty if all steps average gradients."""
    if job.one_bit is None:
        return {}
    zero = traffic(job, layout)
    bits = max(exchange_bytes(job, layout, stages) for stages in stages_of_ranks(layout))
    sent = {"full": int(zero.scatter_bytes + zero.replica_bytes), "one_bit": bits, "local": 0}
    return {kind: ExchangePart(steps=steps, sent_bytes=sent[kind]) for kind, steps in job.one_bit.steps}


def traffic(job: TrainingWork, layout: Layout) -> ZeroTraffic:
    """Return ZeRO's calls and bytes; a ring gather or scatter sends (n-1)/n of the whole.

    Parameters are gathered once a step, or with ZeRO-3 for each pass of each micro-batch; with ZeRO-3 the last group
    stays gathered between forward and backward, and persistent parameters are gathered once a step, with one message.
    Gradients are scattered once a step, or with ZeRO-2 and 3 once per micro-batch. Where ranks share experts, the
    experts' parameters and gradients travel between the ranks with the same experts.
    """
    of_ranks = (_traffic(job, layout, stages) for stages in stages_of_ranks(layout))
    return max(of_ranks, key=lambda one: one.gather_bytes + one.scatter_bytes + one.replica_bytes)


def _traffic(job: TrainingWork, layout: Layout, stages: Sequence[int]) -> ZeroTraffic:
    """Return the traffic of a pipeline rank that holds ``stages``."""
    on_rank = _rank_groups(job, layout, stages)
    # Ranks that share a sequence have gradients of different tokens, like ranks with different sequences.
    zero, k, cp = layout.data.zero, layout.derived.accumulation, layout.mesh.cp
    shards = layout.mesh.dp_shard * cp if zero else 1
    replicas = layout.mesh.dp_replicate * (1 if zero else layout.mesh.dp_shard * cp)
    elements = sum(on_rank)
    trained = elements * trained_share(job.model, job.frozen, job.few_bits)
    # Below ZeRO-3, frozen parameters are whole on each rank; a group without others is neither gathered nor reduced.
    narrow = bool(job.frozen) and bool(job.backward) and memory_stack(job.stack.name).narrow_frozen
    narrow = narrow and not moves_weights(layout)
    with_gradients = sum(_trains(job, layout, stages)) if narrow else len(on_rank)
    gathered, gather_groups = (trained, with_gradients) if narrow and zero < 3 else (elements, len(on_rank))
    ring = (shards - 1) / shards
    turns = k * (1.0 + job.perturbed)
    # A pass leaves the last group gathered: the backward pass, or the next forward pass, finds it there.
    by_zero3 = turns * (2.0 - on_rank[-1] / elements) if job.backward else turns - (turns - 1) * on_rank[-1] / elements
    gathers = 0.0 if zero == 0 or shards == 1 else 1.0 if zero < 3 else by_zero3
    both = turns * (2 * len(on_rank) - 1) if job.backward else turns * len(on_rank) - (turns - 1)
    calls = 0 if zero == 0 or shards == 1 else gather_groups if zero < 3 else round(both)
    controls = controls_of_layout(layout.data)
    calls *= messages_of_unit(job.model, controls, zero)
    kept = 0.0
    if gathers and zero == 3 and controls.persistent_elements:
        # A pipeline rank trains the same share of its parameters as the model does.
        kept = kept_elements(job.model, controls.persistent_elements) * elements / sum(_group_elements(job, layout))
        calls += 1
    reductions = 0 if shards == 1 or not job.backward else k if zero >= 2 else 1
    shard = trained * job.master_bytes / shards
    experts = _of_experts(job, layout, stages) if layout.expert > 1 else _NOTHING
    return ZeroTraffic(
        gather_calls=calls + experts.gather_calls,
        reduce_calls=with_gradients * (reductions + (job.backward and replicas > 1)) + experts.reduce_calls,
        gather_bytes=(gathers * (gathered - kept) + kept) * ring * job.compute_bytes + experts.gather_bytes,
        scatter_bytes=reductions * ring * trained * job.master_bytes + experts.scatter_bytes,
        replica_bytes=2 * (replicas - 1) / replicas * shard + _ring_bytes(job, layout) + experts.replica_bytes,
    )


_NOTHING = ZeroTraffic(0, 0, 0.0, 0.0, 0.0)


def _of_experts(job: TrainingWork, layout: Layout, stages: Sequence[int]) -> ZeroTraffic:
    """Return the traffic of a rank's experts among the ranks with the same experts."""
    mesh, zero, k = layout.mesh, layout.data.zero, layout.derived.accumulation
    layers = [layer for stage in stages for layer in range(*layout.pipeline.bounds[stage])]
    shares, places = share_columns(job, encode(layout)).layers, layer_places(job.model)
    each = [int(shares[places[layer]][1]) for layer in layers if job.model.is_moe_layer(layer)]
    units, elements = len(each), sum(each)
    trained = elements * _trained_experts(job.model, job.frozen, job.few_bits)
    shards = mesh.dp_shard * mesh.cp * mesh.tp // layout.expert_ranks
    ring, replicas = (shards - 1) / shards, mesh.dp_replicate
    gathers = 0 if shards == 1 else 1 if zero < 3 else (1 + job.backward) * k
    reductions = 0 if shards == 1 or not job.backward else k if zero >= 2 else 1
    return ZeroTraffic(
        gather_calls=gathers * units,
        reduce_calls=units * (reductions + (job.backward and replicas > 1)),
        gather_bytes=gathers * elements * ring * job.compute_bytes,
        scatter_bytes=reductions * ring * trained * job.master_bytes,
        replica_bytes=2 * (replicas - 1) / replicas * trained * job.master_bytes / shards,
    )


@lru_cache(maxsize=16)
def _trained_experts(model: ModelConfig, frozen: tuple[str, ...], few_bits: FewBits | None) -> float:
    return _trained([info for info in parameters(model) if info.kind == "expert"], frozen, few_bits)


def _trained(infos: Sequence[ParameterInfo], frozen: tuple[str, ...], few_bits: FewBits | None) -> float:
    fixed = sum(weighed(info, few_bits) for info in infos if is_frozen(info.name, frozen))
    return 1.0 - fixed / max(sum(weighed(info, few_bits) for info in infos), 1)


def _ring_bytes(job: TrainingWork, layout: Layout) -> float:
    """Return the bytes sent to sum gradients of embedding and head over a ring, whose ranks all have both modules."""
    if not moves_weights(layout):
        return 0.0
    first, *_, last = _group_elements(job, layout)
    return 2 * (layout.mesh.pp - 1) / layout.mesh.pp * (first + last) * job.master_bytes


@lru_cache(maxsize=16)
def trained_share(model: ModelConfig, frozen: tuple[str, ...], few_bits: FewBits | None = None) -> float:
    """Return the share of the parameters' elements that is trained; matrices in few bits count as fewer elements."""
    return _trained(parameters(model), frozen, few_bits) if frozen else 1.0


def _rank_groups(job: TrainingWork, layout: Layout, stages: Iterable[int]) -> list[int]:
    """Return the number of elements in each group of parameters that a pipeline rank with ``stages`` all-gathers."""
    first, *layers, last = _group_elements(job, layout)
    sizes: list[int] = []
    everywhere = moves_weights(layout)
    for index in stages:
        start, stop = layout.pipeline.bounds[index]
        begins, ends = index == 0 and not everywhere, index == len(layout.pipeline.bounds) - 1 and not everywhere
        sizes += [first] * begins + layers[start:stop] + [last] * ends
    return [first, *sizes, last] if everywhere else sizes


def _trains(job: TrainingWork, layout: Layout, stages: Iterable[int]) -> list[bool]:
    """Return whether each group of :func:`_rank_groups` has parameters that are trained."""
    first, *layers, last = (
        any(not is_frozen(info.name, job.frozen) for info in group if layout.expert == 1 or info.kind != "expert")
        for group in groups(job.model)
    )
    trains: list[bool] = []
    for index in stages:
        start, stop = layout.pipeline.bounds[index]
        ends = index == len(layout.pipeline.bounds) - 1
        trains += [first] * (index == 0) + layers[start:stop] + [last] * ends
    return trains


def _group_elements(job: TrainingWork, layout: Layout) -> list[int]:
    """Return the number of elements in each group of parameters, on the tensor rank with the most elements.

    Experts that ranks share are groups of their own, and not counted here.
    """
    shares = share_columns(job, encode(layout))
    layers = [int(common + (expert if layout.expert == 1 else 0)) for common, expert in shares.layers]
    return [int(shares.embedding), *(layers[place] for place in layer_places(job.model)), int(shares.head)]

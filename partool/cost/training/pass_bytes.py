"""Bytes that a rank's passes hold: saved activations, tensors of one layer's backward pass, the loss, and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import FULL, KEEP_ATTENTION, ONE_AT_THE_END, SELECTIVE, Column, Layouts, among
from partool.cost.kinds import places_of
from partool.cost.memory import sequence as sequence_memory
from partool.cost.memory.activations import (
    early_loss,
    micro_batch_tokens,
    norm_per_token,
    saved_by_layer,
    tile_bytes,
    widths,
)
from partool.cost.memory.backward import BackwardBytes, dense_backward, gradients_per_token
from partool.cost.memory.expert_backward import experts_backward
from partool.cost.memory.in_flight import first_stage_inputs
from partool.cost.memory.rank_parameters import DENSE, MOE, BegunStages, RankLoad
from partool.cost.memory.stacks import MemoryStack
from partool.cost.memory.transient import exchange_bytes, loss_bytes, taught_loss_bytes
from partool.cost.sequence import shares as sequence_shares
from partool.cost.time.quantised import numbers_bytes
from partool.work.training import TrainingWork

_ON_DEVICE = 3.0
"""Number of layers whose saved tensors are on the device while the tensors of other layers are in host memory."""


class LayerBytes(NamedTuple):
    """Bytes of one layer; each field is a column."""

    saved: Column
    """Bytes that it saves."""
    backward_peak_bytes: Column
    """Bytes by which its backward pass exceeds these; this and the next three are of :class:`BackwardBytes`."""
    expert_reduction_bytes: Column
    after_experts_bytes: Column
    recompute_end_bytes: Column


Layers = dict[tuple[int, int], LayerBytes]
"""Maps (kind, policy) to the bytes of one layer."""


@dataclass(frozen=True)
class PassBytes:
    """Bytes that a rank's passes hold; each field is a column."""

    saved: Column
    """Bytes of saved activations on the device, of all micro-batches in flight, and of the embeddings' perturbation."""
    backward_peak_bytes: Column
    """Bytes by which one layer's backward pass exceeds what the layer saves, at its fullest moment; for layers whose
    experts ranks share, at the fullest moment of the experts. The most of any of the rank's layers."""
    dense_peak_bytes: Column
    """The same of dense layers only; 0 on ranks without any."""
    moe_peak_bytes: Column
    """The same of layers with experts."""
    expert_reduction_bytes: Column
    """The same when such experts' gradients have been computed, without these gradients."""
    after_experts_bytes: Column
    """The same while the rest of such a layer follows."""
    recompute_end_bytes: Column
    """The same at the end of the forward pass that recomputes such a layer."""
    of_layer: Column
    """Bytes that one layer saves for one micro-batch on the device, the mean over the rank's layers."""
    of_norm: Column
    """Part of ``saved`` that the final norm keeps, and nothing needs any more when the layers' backward passes run."""
    stream: Column
    """Bytes of the residual stream of one micro-batch."""
    on_host: Column
    """Bytes of saved activations in host memory."""
    loss: Column
    """Bytes of logits and gradients of the loss's forward pass; this and the next five are of :class:`LossBytes`."""
    loss_backward: Column
    loss_beside_layers: Column
    loss_per_micro_batch: Column
    loss_within: Column
    freed: Column
    """Bytes of logits that are freed before the loss's peak; their block of memory stays empty."""
    result: Column
    """Bytes of the final norm's result while a fused loss uses it; nothing keeps it."""
    handed: Column
    """Bytes of the last stage's result, which a pipeline holds until its backward pass."""
    tables: Column
    """Bytes of the tables of rotations."""
    numbers: Column
    """Bytes of the largest frozen matrix of few bits as numbers, which a product needs."""
    inputs: Column
    """Bytes of stage inputs in flight that came as messages: ``received`` has them, too."""
    received: Column
    """Bytes of buffers of messages between stages."""
    layers: Column
    of_stage: Column
    """Number of layers of one of the rank's stages, whose units FSDP2 gathers and reduces one after the other."""
    exchanged: Column
    """Bytes of buffers of tensor, sequence and expert parallelism."""
    copies: Column
    """Bytes of flat copies of weights and gradients, where ranks pass weights to each other."""
    in_flight: Column
    """Number of micro-batches in flight, as in :class:`RankLoad`."""
    ending: Column
    """Micro-batches between the last stage's forward and backward passes."""
    begun: tuple[BegunStages, ...] = ()
    """Moments with gradients of some of the stages, as in :class:`RankLoad`."""

    def of_rows(self, rows: slice) -> PassBytes:
        """Return the same under some of the layouts; all columns are arrays [..., layouts], and nothing has begun."""
        fields: dict[str, Any] = {name: column for name, column in self.__dict__.items() if name != "begun"}
        return PassBytes(**{name: column[..., rows] for name, column in fields.items()})


def pass_bytes(job: TrainingWork, layouts: Layouts, stack: MemoryStack, load: RankLoad, layers: Layers) -> PassBytes:
    """Return the bytes that the passes of a rank hold; ``layers`` has the bytes of single layers."""
    (dense_peak_bytes,) = _largest(load, layers, DENSE)
    of_shapes = [_largest(load, layers, MOE + shape, 4) for shape in range(len(job.model.expert_shapes))]
    moe_peak_bytes, expert_reduction_bytes, after_experts_bytes, recompute_end_bytes = (
        np.maximum.reduce(np.broadcast_arrays(*each)) for each in zip(*of_shapes, strict=True)
    )
    stream = widths(job, layouts, DENSE).hidden * job.compute_bytes * micro_batch_tokens(job, layouts)
    of_norm = _norm_bytes(job, layouts, stack, load)
    saved = _activations(layouts, stack, load, layers, stream) + of_norm
    on_host = np.where(layouts.offload_activations == 1, _movable(layouts, load, layers, stream), 0.0)
    if not job.backward:  # a micro-batch leaves nothing behind
        load = replace(load, in_flight=1.0 + 0.0 * load.in_flight, ending=None)
    ending = at_the_end(layouts, load) if job.backward else 1.0
    losses = loss_bytes(job, layouts, stack, ending)
    if job.teacher is not None:
        losses = taught_loss_bytes(job, job.teacher.model, layouts, stack)
    result = load.last * np.where(early_loss(job, layouts), stream, 0.0)
    inputs, buffers = (count * stream for count in _received(layouts, load))
    perturbation = stream * max(job.compute_bytes, 4) / job.compute_bytes if job.perturbed else 0.0
    passes = PassBytes(
        saved=saved - on_host + perturbation,
        backward_peak_bytes=_backward_peak(load, layers, np.maximum(dense_peak_bytes, moe_peak_bytes)),
        dense_peak_bytes=dense_peak_bytes,
        moe_peak_bytes=moe_peak_bytes,
        expert_reduction_bytes=expert_reduction_bytes,
        after_experts_bytes=after_experts_bytes,
        recompute_end_bytes=recompute_end_bytes,
        of_layer=(saved - of_norm) / np.maximum(load.in_flight * load.larger * load.layer_count, 1.0),
        of_norm=of_norm,
        stream=stream,
        on_host=on_host,
        loss=load.last * losses.forward,
        loss_backward=load.last * losses.backward,
        loss_beside_layers=load.last * losses.beside_layers,
        loss_per_micro_batch=load.last * losses.per_micro_batch,
        loss_within=load.last * losses.within,
        freed=load.last * losses.freed,
        result=result,
        handed=np.where(np.asarray(layouts.pp) > 1, result, 0.0),
        tables=_tables_bytes(job, layouts),
        numbers=numbers_bytes(job, layouts) + 0.0 * stream,
        inputs=inputs,
        received=buffers,
        layers=load.layer_count,
        of_stage=load.layer_count / np.maximum(layouts.chunks, 1),
        exchanged=exchange_bytes(job, layouts),
        copies=_copies_bytes(job, load),
        in_flight=load.in_flight,
        ending=ending,
        begun=load.begun,
    )
    return passes if job.backward else _forward_only(passes, layers)


def _forward_only(passes: PassBytes, layers: Layers) -> PassBytes:
    """Return the bytes of passes that save nothing; ``of_layer`` are those of all tensors of the largest layer.

    A layer frees tensors as it goes on: the sum of all of them is a bound from above.
    """
    kept = (
        "stream",
        "loss",
        "loss_within",
        "tables",
        "numbers",
        "received",
        "layers",
        "of_stage",
        "exchanged",
        "copies",
    )
    nothing: dict[str, Any] = {field.name: 0.0 * passes.stream for field in fields(PassBytes) if field.name not in kept}
    largest = np.maximum.reduce(
        np.broadcast_arrays(*(layer.saved for (_, policy), layer in layers.items() if not policy))
    )
    return replace(passes, **nothing | {"of_layer": largest, "in_flight": 1.0, "ending": 1.0, "begun": ()})


def _tables_bytes(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the bytes of cosines and sines for the positions of a rank's tokens (``model/rope.py`` of the runtime)."""
    if job.model.position != "rope":
        return 0.0
    return 2 * max(job.compute_bytes, 4) * job.model.head_dim * sequence_shares.tokens(job, layouts)


def _received(layouts: Layouts, load: RankLoad) -> tuple[Column, Column]:
    """Return the number of stage inputs in flight that came as messages, and of all buffers of messages.

    Buffers last (``_Buffers`` of ``parallel/pipeline/wires.py``): beside the inputs in flight there is one for a
    gradient or for the next input, and there are two more where messages come for several stages. The rank with the
    last stage makes the first gradient itself.
    """
    pp, chunks = np.asarray(layouts.pp), np.asarray(layouts.chunks)
    receives = np.where((pp > 1) & ~np.asarray(layouts.ring), 1.0, 0.0)
    all_inputs = load.in_flight * chunks
    # The first rank makes the first stage's inputs.
    local_inputs = (
        np.where(load.first == 1, first_stage_inputs(layouts, all_inputs), 0.0)
        if load.local_inputs is None
        else load.local_inputs
    )
    inputs = np.maximum(all_inputs - local_inputs, 0.0)
    ahead = np.where((all_inputs < layouts.accumulation * chunks) | (load.last == 0), 1.0, 0.0)
    buffers = np.maximum(inputs + ahead + np.where((chunks > 1) & (load.first == 0), 2.0, 0.0), 1.0)
    return receives * inputs, receives * buffers


def at_the_end(layouts: Layouts, load: RankLoad) -> Column:
    """Return how many micro-batches are between the last stage's forward and backward passes, weight gradients too.

    Folded stages hold few at the end once there are more micro-batches than ranks.
    """
    several = (np.asarray(layouts.pp) > 1) & ~np.asarray(among(layouts.schedule, ONE_AT_THE_END))
    if load.ending is not None:
        return np.where(several, load.ending, 1.0)
    few = np.where(np.asarray(layouts.folded) & (layouts.accumulation > layouts.pp), 1.0, load.in_flight)
    return np.where(several, few, 1.0)


def _movable(layouts: Layouts, load: RankLoad, layers: Layers, stream: Column) -> Column:
    """Return the bytes of saved activations that go to the host.

    The saved tensors of the last layer and of two layers in transfer stay on the device. Where blocks are not compiled,
    the results that selective recomputation keeps also stay on the device, as autograd saves only the layers' inputs.
    """
    total: Column = 0.0
    for (kind, policy), count in load.kept.items():
        saved = layers[kind, policy].saved
        if policy in (SELECTIVE, KEEP_ATTENTION):
            saved = np.where(layouts.compiled == 1, saved, stream)
        total = total + saved * count
    several = load.layer_count * np.maximum(load.in_flight, 1.0)
    return total * load.in_flight * np.maximum(0.0, 1.0 - _ON_DEVICE / several)


def _copies_bytes(job: TrainingWork, load: RankLoad) -> Column:
    """Return the bytes of a rank's flat copies of weights and gradients; 0 unless ranks pass weights to each other."""
    ring = load.ring
    if ring is None:
        return 0.0
    each = ring.weights * job.compute_bytes + ring.gradients * job.master_bytes
    return np.where(ring.passes_weights, ring.elements * each, 0.0)


def bytes_of_layers(job: TrainingWork, layouts: Layouts, stack: MemoryStack, loads: Sequence[RankLoad]) -> Layers:
    """Return the bytes of one layer by (kind, policy)."""
    policies = sorted({0} | {policy for each in loads for _, policy in each.kept})
    layer_bytes: Layers = {}
    for kind in places_of(job.model):
        all_saved = saved_by_layer(job, layouts, stack, kind, 0) + sequence_memory.saved_bytes(job, layouts, 0)
        passing = _backward_bytes(job, layouts, stack, kind, all_saved)
        for policy in policies:
            saved = all_saved
            if policy != 0:
                more = sequence_memory.saved_bytes(job, layouts, policy)
                saved = saved_by_layer(job, layouts, stack, kind, policy) + more
            # Only one layer's tensors are rebuilt at a time, while its backward pass runs.
            rebuilt = np.maximum(0.0, all_saved - saved) + tile_bytes(job, layouts)
            recompute_end_bytes = passing.recompute_end_bytes if policy in (FULL, KEEP_ATTENTION) else 0.0
            alone = np.where(layouts.ep > 1, 0.0, recompute_end_bytes)
            beside_saved = (
                np.maximum(passing.backward_peak_bytes, alone),
                passing.expert_reduction_bytes,
                passing.after_experts_bytes,
                recompute_end_bytes,
            )
            layer_bytes[kind, policy] = LayerBytes(saved, *(rebuilt + each for each in beside_saved))
    return layer_bytes


def _backward_bytes(
    job: TrainingWork, layouts: Layouts, stack: MemoryStack, kind: int, saved_bytes: Column
) -> BackwardBytes:
    """Return what the backward pass of a layer of ``kind`` takes, without the tensors that it rebuilds."""
    job, kind = job.of_shape(max(kind - MOE, 0)), min(kind, MOE)
    if job.devices.backend == "cpu":
        return BackwardBytes(0.0)
    traced = None
    if stack.traced and kind == MOE:
        traced = experts_backward(job, layouts, saved_bytes)
    elif stack.traced:
        traced = dense_backward(job, layouts, saved_bytes)
    if traced is not None:
        return traced
    gradients = gradients_per_token(job, layouts, stack, kind) * micro_batch_tokens(job, layouts)
    return BackwardBytes(gradients + (exchange_bytes(job, layouts) if stack.traced else 0.0))


def _largest(load: RankLoad, layers: Layers, kind: int, fields: int = 1) -> list[Column]:
    """Return the first ``fields`` columns of :class:`LayerBytes` after ``saved``, each of the rank's fullest layer.

    They are 0 where the rank has no layers of this kind.
    """
    most_bytes: list[Column] = [-np.inf] * fields
    for key, count in load.kept.items():
        if key[0] == kind:
            one_bytes = layers[key][1 : 1 + fields]
            most_bytes = [
                np.where(count > 0, np.maximum(*pair), pair[1]) for pair in zip(one_bytes, most_bytes, strict=True)
            ]
    return [np.where(np.isneginf(most), 0.0, most) for most in most_bytes]


def _backward_peak(load: RankLoad, layers: Layers, peak_bytes: Column) -> Column:
    """Return ``peak_bytes`` of the rank's layers, or those of layers that save all where ranks pass weights on."""
    if load.ring is None:
        return peak_bytes
    every = [layer.backward_peak_bytes for (_, policy), layer in layers.items() if not policy]
    return np.where(load.ring.passes_weights, np.maximum.reduce(np.broadcast_arrays(*every)), peak_bytes)


def _norm_bytes(job: TrainingWork, layouts: Layouts, stack: MemoryStack, load: RankLoad) -> Column:
    norm = load.last * norm_per_token(job, layouts, stack) * micro_batch_tokens(job, layouts)
    return norm * at_the_end(layouts, load) if stack.traced else norm


def _activations(layouts: Layouts, stack: MemoryStack, load: RankLoad, layers: Layers, stream: Column) -> Column:
    """Return the bytes that layers save for all micro-batches in flight; ``stream`` are those of a layer's input."""
    saved: Column = 0.0
    for key, count in load.kept.items():
        saved = saved + layers[key].saved * count
    if stack.keeps_boundary:
        # Every chunk except the last stage's keeps the tensors that it sends.
        saved = saved + np.where(layouts.pp > 1, stream * layouts.chunks * (1 - load.last), 0.0)
    in_flight_bytes = saved * load.in_flight * load.larger
    if load.ring is not None:
        ring = load.ring
        rebuilt = sum(
            count * layers[kind, 0].saved for kind, count in enumerate(ring.rebuilt) if (kind, 0) in layers
        )  # fmt: skip
        in_flight_bytes = np.where(ring.passes_weights, ring.inputs * stream + rebuilt, in_flight_bytes)
    return in_flight_bytes

"""Bytes that a rank's passes hold: saved activations, tensors of one layer's backward pass, the loss, and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partool.cost.case import KEEP_ATTENTION, SELECTIVE, Column, Layouts, TrainingJob
from partool.cost.memory import sequence as sequence_memory
from partool.cost.memory.activations import (
    gradients_per_token,
    micro_batch_tokens,
    norm_per_token,
    saved_by_layer,
    tile_bytes,
    widths,
)
from partool.cost.memory.rank_parameters import DENSE, MOE, RankLoad
from partool.cost.memory.stacks import MemoryStack
from partool.cost.memory.transient import exchange_bytes, loss_bytes

_ON_DEVICE = 3.0
"""Number of layers whose saved tensors are on the device while the tensors of other layers are in host memory."""
Layers = dict[tuple[int, int], tuple[Column, Column]]
"""Maps (kind, policy) to the bytes that one layer saves and the bytes that its backward pass takes while it runs."""


@dataclass(frozen=True)
class PassBytes:
    """Bytes that a rank's passes hold; each field is a column."""

    saved: Column
    """Bytes of saved activations on the device, of all micro-batches in flight."""
    at_work: Column
    """Bytes of tensors that exist while one layer's backward pass runs."""
    on_host: Column
    """Bytes of saved activations in host memory."""
    loss: Column
    freed: Column
    """Bytes of logits that are freed before the loss's peak; their block of memory stays empty."""
    exchanged: Column
    """Bytes of buffers of tensor, sequence and expert parallelism."""
    copies: Column
    """Bytes of flat copies of weights and gradients, where ranks pass weights to each other."""
    in_flight: Column
    """Number of micro-batches in flight, as in :class:`RankLoad`."""


def work(job: TrainingJob, layouts: Layouts, stack: MemoryStack, held: RankLoad, layers: Layers) -> PassBytes:
    """Return the bytes that the passes of a rank hold; ``layers`` has the bytes of single layers."""
    saved, at_work = _activations(job, layouts, stack, held, layers)
    on_host = np.where(layouts.offload_activations == 1, _movable(job, layouts, held, layers), 0.0)
    loss, freed = (held.last * size for size in loss_bytes(job, layouts, stack))
    exchanged, copies = exchange_bytes(job, layouts), _copies_bytes(job, held)
    return PassBytes(saved - on_host, at_work, on_host, loss, freed, exchanged, copies, held.in_flight)


def _movable(job: TrainingJob, layouts: Layouts, held: RankLoad, layers: Layers) -> Column:
    """Return the bytes of saved activations that go to the host.

    The saved tensors of the last layer and of two layers in transfer stay on the device. Where blocks are not compiled,
    the results that selective recomputation keeps also stay on the device, as autograd saves only the layers' inputs.
    """
    inputs = widths(job, layouts, DENSE).hidden * job.compute_bytes * micro_batch_tokens(job, layouts)
    total: Column = 0.0
    for (kind, policy), count in held.kept.items():
        there = layers[kind, policy][0]
        if policy in (SELECTIVE, KEEP_ATTENTION):
            there = np.where(layouts.compiled == 1, there, inputs)
        total = total + there * count
    several = held.layer_count * np.maximum(held.in_flight, 1.0)
    return total * held.in_flight * np.maximum(0.0, 1.0 - _ON_DEVICE / several)


def _copies_bytes(job: TrainingJob, held: RankLoad) -> Column:
    """Return the bytes of a rank's flat copies of weights and gradients; 0 unless ranks pass weights to each other."""
    ring = held.ring
    if ring is None:
        return 0.0
    each = ring.weights * job.compute_bytes + ring.gradients * job.master_bytes
    return np.where(ring.there, ring.elements * each, 0.0)


def bytes_of_layers(job: TrainingJob, layouts: Layouts, stack: MemoryStack, held: Sequence[RankLoad]) -> Layers:
    """Return, by (kind, policy), the bytes that one layer saves and the bytes that the layer's backward pass takes."""
    policies = sorted({0} | {policy for each in held for _, policy in each.kept})
    found: Layers = {}
    tokens = micro_batch_tokens(job, layouts)
    for kind in (DENSE, MOE) if job.model.moe else (DENSE,):
        whole = saved_by_layer(job, layouts, stack, kind, 0) + sequence_memory.saved_bytes(job, layouts, 0)
        backward: Column = 0.0
        if job.devices.backend != "cpu":
            backward = gradients_per_token(job, layouts, stack, kind) * tokens
        for policy in policies:
            there = whole
            if policy != 0:
                more = sequence_memory.saved_bytes(job, layouts, policy)
                there = saved_by_layer(job, layouts, stack, kind, policy) + more
            # Only one layer's tensors are rebuilt at a time, while its backward pass runs.
            rebuilt = np.maximum(0.0, whole - there) + tile_bytes(job, layouts)
            found[kind, policy] = there, rebuilt + backward
    return found


def _activations(
    job: TrainingJob, layouts: Layouts, stack: MemoryStack, held: RankLoad, layers: Layers
) -> tuple[Column, Column]:
    """Return the bytes of tensors saved for all micro-batches in flight, and the bytes of one layer's backward pass."""
    saved: Column = 0.0
    at_work: Column = 0.0
    for key, count in held.kept.items():
        there, rebuilt = layers[key]
        saved = saved + there * count
        at_work = np.maximum(at_work, np.where(count > 0, rebuilt, 0.0))
    tokens = micro_batch_tokens(job, layouts)
    if stack.keeps_boundary:
        # Every chunk except the last stage's keeps the tensors that it sends.
        sent = widths(job, layouts, DENSE).hidden * job.compute_bytes * tokens * layouts.chunks
        saved = saved + np.where(layouts.pp > 1, sent * (1 - held.last), 0.0)
    norm = norm_per_token(job, layouts, stack) * tokens
    whole = saved * held.in_flight
    if held.ring is not None:
        ring, boundary = held.ring, widths(job, layouts, DENSE).hidden * job.compute_bytes * tokens
        rebuilt = sum(
            count * layers[kind, 0][0] for kind, count in enumerate(ring.rebuilt) if (kind, 0) in layers
        )  # fmt: skip
        whole = np.where(ring.there, ring.inputs * boundary + rebuilt, whole)
        kinds = [kind for kind in (DENSE, MOE) if (kind, 0) in layers]
        backward = np.max(np.stack([np.asarray(layers[kind, 0][1] + 0.0 * tokens) for kind in kinds]), axis=0)
        at_work = np.where(ring.there, backward, at_work)
    return whole + held.last * norm, at_work

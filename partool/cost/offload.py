"""Seconds of host memory at work: gradients, weights and activations on the host link, and the host's AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost.case import Column, Job, Layouts

_LINK_SHARE = 0.8
"""Of the host link's rate that copies from pinned memory reach."""
_BESIDE = 0.8
"""Of the passes, what can hide traffic and the host's work."""
_START_SHARE = 0.05
"""Of these, what shows even where the passes are long: the first and last pieces have nothing beside them."""
_HOST_BYTES = 28.0
"""Memory traffic of AdamW per parameter: gradient, weight and two moments read, three written back."""


@dataclass(frozen=True)
class Offload:
    """Seconds per optimizer step of one rank."""

    transfer_s: Column
    optimizer_s: Column
    exposed_s: Column


def offload(
    job: Job, layouts: Layouts, elements: Column, *, saved_bytes: Column, passes_s: Column, last_s: Column
) -> Offload:
    """Return the cost of host memory for a rank that owns ``elements`` parameters of the optimizer.

    ``saved_bytes`` are the activations of one micro-batch, ``passes_s`` is all compute of the step, ``last_s`` the last
    backward pass, beside which gradients leave (ZeRO-Offload, arXiv 2101.06840, section 4).
    """
    devices = job.devices
    if not devices.host_link_bytes_per_s:
        nothing = 0.0 * layouts.host_optimizer
        return Offload(nothing, nothing, nothing)
    # All devices of a node draw on the same memory.
    link = _LINK_SHARE * min(devices.host_link_bytes_per_s, devices.host_memory_bytes_per_s / devices.per_node)
    memory = job.stack.host_share * devices.host_memory_bytes_per_s / devices.per_node
    moved = layouts.host_optimizer * elements
    down = moved * job.stack.gradient_bytes / link
    up = moved * job.compute_bytes / link
    adam = _HOST_BYTES * moved / memory
    # Gradients leave during the last backward pass and the host starts on the first ones; then weights come back.
    late = np.maximum(down, adam)
    weights = layouts.host_parameters * 2.0 * layouts.accumulation * elements * job.compute_bytes / link
    activations = layouts.host_activations * layouts.accumulation * 2.0 * saved_bytes / link
    early = weights + activations
    waits = np.maximum(late - _BESIDE * last_s, early + late - _BESIDE * passes_s)
    start = _START_SHARE * (early + np.minimum(adam, last_s))
    return Offload(down + up + early, adam, np.maximum(waits, 0.0) + start + up)

"""Seconds of offloading: transfers over the host link, the host's optimizer, and reads and writes of disks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost.case import Column, Layouts
from partool.cost.training.host_state import accumulates, bucket_elements, state_bytes, wire_bytes
from partool.cost.training.optimizer import device_update_s
from partool.cost.training.traffic import trained_share
from partool.work.training import TrainingWork

_LINK_SHARE = 0.8
"""Share of the host link's rate that copies from pinned memory reach."""
_BESIDE = 0.8
"""Share of the passes' time that can hide transfers and the host's work."""
_START_SHARE = 0.05
"""Share of the overlapping host work that is exposed even where passes are long, as that work competes for memory and
cores with the host's kernel launches."""
_HOST_BYTES = 28.0
"""Bytes of AdamW's memory traffic per parameter: gradient, weight and two moments read, three of them written back."""
_CORE_BYTES_PER_S = 12e9
"""Bytes per second that one core of a server streams; many cores share the memory's rate."""
_DISK_SHARE = 0.9
"""Share of the disks' rate that concurrent reads and writes in large blocks reach."""


FAST_LINK = 100e9
"""Bytes per second of a link (NVLink-C2C) above which the host's update may be faster than the device's."""


@dataclass(frozen=True)
class OffloadTime:
    """Seconds of offloading on one rank per optimizer step."""

    transfer_s: Column
    optimizer_s: Column
    exposed_s: Column
    """Seconds by which the host's work outlasts the passes."""
    slowdown_s: Column = 0.0
    """Seconds by which the host's work slows down the passes that it overlaps with."""
    disk_s: Column = 0.0


@dataclass(frozen=True)
class Chain:
    """Seconds of the stages that a rank's optimizer state passes through in a step, if all of it is on the host."""

    down_s: Column
    """Seconds to send the gradients of the last backward pass to the host."""
    early_s: Column
    """Seconds of the host's work on gradients of earlier micro-batches; this work overlaps with passes."""
    early_down_s: Column
    update_s: Column
    up_s: Column
    """Seconds to send weights to the device."""
    disk_s: Column
    lag_s: Column
    """Seconds that the last bucket takes through all stages; no other work overlaps with these seconds."""
    speculates: bool


def offload(
    job: TrainingWork, layouts: Layouts, elements: Column, *, saved_bytes: Column, passes_s: Column, last_s: Column
) -> OffloadTime:
    """Return the seconds of offloading on a rank whose optimizer owns ``elements`` parameters.

    ``saved_bytes`` is the size of one micro-batch's activations, ``passes_s`` the time of all compute of the step, and
    ``last_s`` the time of the last backward pass, during which gradients are sent to the host (ZeRO-Offload, arXiv
    2101.06840, section 4).
    """
    devices, nothing = job.devices, 0.0 * layouts.gpu_fraction
    if devices.backend == "cpu":
        return _in_turns(job, layouts, elements)
    if not devices.host_link_bytes_per_s:
        return OffloadTime(nothing, nothing, nothing)
    link = link_rate(job)
    # Passes that find perturbations use parameters and activations, too, but have no gradients for the host.
    turns, last_s = layouts.accumulation * (1.0 + job.perturbed), last_s / (1.0 + job.perturbed)
    stored = _stored(job, elements)
    weights = layouts.offload_parameters * 2.0 * turns * stored * job.compute_bytes
    activations = layouts.offload_activations * turns * 2.0 * saved_bytes / link
    early = weights / link + activations
    if not job.stack.staged_offload:
        return _published(job, layouts, elements, early, passes_s=passes_s, last_s=last_s)
    # Parameters in files are read for each pass and written once.
    written = layouts.offload_parameters * stored * job.compute_bytes
    from_disk = (weights + written) / disk_rate(job) if job.offload.parameters == "nvme" else nothing
    early = np.maximum(early, from_disk)
    share = 1.0 - layouts.gpu_fraction
    stages = chain(job, layouts, elements)
    moved = share > 0
    down, adam, up, disk = (share * part for part in (stages.down_s, stages.update_s, stages.up_s, stages.disk_s))
    lag = np.where(moved, stages.lag_s, 0.0)
    # The device keeps the state whose gradients come last, so the host has the end of the backward pass to finish.
    arrives = np.maximum(share * last_s, down)
    worked = np.maximum(adam, np.maximum(up, disk))
    ends = np.maximum(arrives, worked) + lag if stages.speculates else np.maximum(arrives, last_s) + worked + lag
    before = share * (stages.early_s + stages.early_down_s) + early
    outlasting_s = np.where(moved, np.maximum(ends - last_s, 0.0), 0.0)
    crowded = before + np.maximum(down, worked) - _BESIDE * passes_s
    waits = np.maximum(outlasting_s, crowded)
    worked_all = adam + share * (stages.early_s + stages.early_down_s)
    slowdown = _START_SHARE * (early + np.minimum(worked_all, passes_s))
    if devices.host_link_bytes_per_s < FAST_LINK:
        # Over PCIe, the host's work has never been observed to cost less than the device update that it replaces.
        slowdown = np.maximum(slowdown, share * device_update_s(job, elements))
    transfers = down + share * stages.early_down_s + up + early
    return OffloadTime(transfers, adam + share * stages.early_s, np.maximum(waits, 0.0), slowdown, disk)


def _stored(job: TrainingWork, elements: Column) -> Column:
    """Return the number of a rank's parameters, frozen ones included, of which ``elements`` are trained."""
    return elements / max(trained_share(job.model, job.frozen, job.few_bits), 1e-12)


def chain(job: TrainingWork, layouts: Layouts, elements: Column) -> Chain:
    """Return the seconds of each stage for the optimizer state of ``elements`` parameters with partool's runtime.

    The update is one pass that reads gradient, master and moments, writes master and moments back, and writes the
    weights. An update deferred until the norm is known reads two gradients instead of one; an update that can be undone
    also writes copies of the state. With several micro-batches the host sums their gradients, and the previous step's
    deferred update overlaps with the first micro-batch.
    """
    link, memory, speculate = link_rate(job), update_rate(job), job.offload.speculate
    wire, state, small = wire_bytes(job, layouts), state_bytes(job), job.compute_bytes
    adds = accumulates(layouts)
    gradient = np.where(adds, job.master_bytes, wire)
    plain = gradient + 2.0 * state + small
    deferred = speculate in (True, "auto")
    one = plain + (wire if deferred else state if speculate == "undo" else 0.0)
    # The next step overwrites the total, so the deferred pass comes before it: two passes over the state.
    put_off = adds & deferred
    last = np.where(put_off, gradient + state + small, one)
    commit = np.where(put_off, gradient + 2.0 * state, 0.0)
    added = np.where(adds, layouts.accumulation * (wire + 2.0 * job.master_bytes), 0.0)
    disk = 0.0 * last
    if job.offload.optimizer == "nvme":
        disk = np.where(put_off, 3.0, 2.0) * state * elements / disk_rate(job)
    sends = np.where(adds, layouts.accumulation, 1)
    down, up = wire * elements / link, small * elements / link
    bucket = bucket_elements(job, layouts, elements) / np.maximum(elements, 1.0)
    update = last * elements / memory
    return Chain(
        down_s=down,
        early_s=(commit + added) * elements / memory,
        early_down_s=(sends - 1) * down,
        update_s=update,
        up_s=up,
        disk_s=disk,
        lag_s=bucket * (down + update + up + disk),
        speculates=speculate is not False,
    )


def link_rate(job: TrainingWork) -> float:
    """Return the bytes per second that one rank sends to host memory; a node's devices share the memory's bandwidth."""
    devices = job.devices
    assert devices.host_link_bytes_per_s is not None
    return _LINK_SHARE * min(devices.host_link_bytes_per_s, devices.host_memory_bytes_per_s / devices.per_node)


def update_rate(job: TrainingWork) -> float:
    """Return the bytes per second at which one rank's cores stream host memory."""
    devices = job.devices
    memory = job.stack.host_share * devices.host_memory_bytes_per_s / devices.per_node
    threads = job.offload.threads
    return memory if threads == "auto" else min(memory, threads * _CORE_BYTES_PER_S)


def disk_rate(job: TrainingWork) -> float:
    """Return the bytes per second that one rank reads from disks and writes to them, together."""
    return _DISK_SHARE * job.devices.disk_bytes_per_s / job.devices.per_node


def _in_turns(job: TrainingWork, layouts: Layouts, elements: Column) -> OffloadTime:
    """Return the seconds of offloading on a CPU; nothing overlaps, as the same cores also run the passes."""
    share, nothing = 1.0 - layouts.gpu_fraction, 0.0 * layouts.gpu_fraction
    if not np.any(share) and not np.any(layouts.offload_parameters):
        return OffloadTime(nothing, nothing, nothing)
    rate = 0.8 * job.devices.memory_bytes_per_s
    wire, small = wire_bytes(job, layouts), job.compute_bytes
    sends = np.where(accumulates(layouts), layouts.accumulation, 1)
    copies = share * elements * (2.0 * sends * wire + 2.0 * small) / rate
    copies = copies + layouts.offload_parameters * 4.0 * layouts.accumulation * _stored(job, elements) * small / rate
    adam = share * elements * (wire + 2.0 * state_bytes(job) + small) / rate
    disk = nothing
    if job.offload.optimizer == "nvme":
        disk = share * 2.0 * state_bytes(job) * elements / disk_rate(job)
    return OffloadTime(copies, adam, nothing, copies + np.maximum(adam, disk), disk)


def _published(
    job: TrainingWork, layouts: Layouts, elements: Column, early: Column, *, passes_s: Column, last_s: Column
) -> OffloadTime:
    """Return the seconds of offloading in other code bases, which update once the norm is known, without overlap."""
    link, memory = link_rate(job), update_rate(job)
    moved = (1.0 - layouts.gpu_fraction) * elements
    down = moved * job.stack.gradient_bytes / link
    up = moved * job.compute_bytes / link
    adam = _HOST_BYTES * moved / memory
    # Gradients are sent during the last backward pass while the host updates parameters; then weights return.
    longest_s = np.maximum(down, adam)
    waits = np.maximum(longest_s - _BESIDE * last_s, early + longest_s - _BESIDE * passes_s)
    start = _START_SHARE * (early + np.minimum(adam, last_s))
    return OffloadTime(down + up + early, adam, np.maximum(waits, 0.0) + start + up)

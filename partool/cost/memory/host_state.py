"""What host memory and disks hold of a rank's training state, in which pieces and types; as columns.

All of it follows from what a spec asks for, or a layout says (``Job.offload``), so that plans say it and the cost
functions count it by the same rules.
"""

from __future__ import annotations

import numpy as np

from partool.cost.case import Column, Layouts, Mask, TrainingJob
from partool.spec.numbers import GIB, MIB

BUFFERS = 4
"""Buckets of a state on disks in host memory: one is stepped, one read, one written, one to spare."""
BUCKET_BYTES = 64 * MIB
"""Of gradients: copies of as much run at the full rate of any host link (SuperOffload, arXiv 2509.21271)."""
_SMALLEST_BUCKET, _SMALLEST_ON_DISKS = 4 * MIB, MIB // 4
"""Of gradients. Smaller ones cost more calls than they hide; but in files small models' states are to be, as well."""
BUCKETS = 16
"""A step has so many buckets at least, so that the first are worked on while the last are not there yet."""
UNDO_SHARE = 0.25
"""Of masters and moments, what copies of the state may take where the spec leaves it open."""
SPARE, _WEIGHTS = 2, 2
"""Buffers of gradients and of weights that are on their way, in buckets."""


def pinned_terms(job: TrainingJob) -> tuple[str, ...]:
    """Return the terms of host memory that devices copy to and from by themselves, of ``plan.terms.HOST_TERMS``."""
    found = ("gradients", "weights", "activations")
    return found if job.offload.parameters == "nvme" else (*found, "parameters")


def wire_bytes(job: TrainingJob, layouts: Layouts) -> Column:
    """Return the bytes of a gradient on its way: those of computation where that loses nothing, or as asked.

    It loses nothing where no sum made the gradient: what one rank's backward pass leaves is of that type already.
    """
    if job.offload.gradients != "auto":
        return 0 * layouts.zero + (job.compute_bytes if job.offload.gradients == "bf16" else job.master_bytes)
    return np.where(np.asarray(layouts.world) == 1, job.compute_bytes, job.master_bytes)


def accumulates(layouts: Layouts) -> Mask:
    """Return where the host adds up the gradients of several micro-batches.

    They come after each where they are reduced after each: with ZeRO-2 and 3, and on a rank that reduces alone.
    Replicas and pipelines add up on the device and send once.
    """
    alone = layouts.dp * layouts.cp == 1
    return (layouts.accumulation > 1) & (layouts.replicas == 1) & (layouts.pp == 1) & (alone | (layouts.zero >= 2))


def waits_on_device(layouts: Layouts) -> Mask:
    """Return where gradients stay on the device until the passes are over, or until the last of them."""
    return (layouts.pp > 1) | ((layouts.accumulation > 1) & np.logical_not(accumulates(layouts)))


def moment_bytes(job: TrainingJob) -> float:
    """Return the bytes of all moments of a parameter on the host."""
    return job.moments * (2 if job.offload.moments == "bf16" else job.master_bytes)


def state_bytes(job: TrainingJob) -> float:
    """Return the bytes of master and moments of a parameter on the host."""
    return job.master_bytes + moment_bytes(job)


def buffers(job: TrainingJob) -> int:
    """Return the buckets of a state on disks that are in host memory at once."""
    return BUFFERS if job.offload.buffers == "auto" else job.offload.buffers


def smallest_bucket(job: TrainingJob) -> int:
    """Return the least bytes of a bucket where its size is open."""
    return _SMALLEST_ON_DISKS if job.offload.optimizer == "nvme" else _SMALLEST_BUCKET


def bucket_elements(job: TrainingJob, layouts: Layouts, elements: Column) -> Column:
    """Return the gradients of a bucket: of 64 MiB, or less by powers of two where a rank would have few."""
    wire = wire_bytes(job, layouts)
    if job.offload.bucket_mib != "auto":
        size = int(job.offload.bucket_mib * MIB) + 0 * wire
    else:
        share = np.exp2(np.floor(np.log2(np.maximum(1.0, wire * elements / BUCKETS))))
        size = np.clip(share, smallest_bucket(job), BUCKET_BYTES)
    return np.minimum(size / wire, np.maximum(elements, 1.0))


def undo_bytes(job: TrainingJob, layouts: Layouts, elements: Column) -> Column:
    """Return the host memory for copies of the state: where it is open, for a bucket's at least."""
    if job.offload.speculate != "undo":
        return 0.0 * elements
    whole = state_bytes(job) * elements
    if job.offload.undo_gib != "auto":
        return 0.0 * whole + int(job.offload.undo_gib * GIB)
    # Shards begin at whole pages, so small ones take more than their elements.
    bucket = np.ceil(1.125 * state_bytes(job) * bucket_elements(job, layouts, elements))
    return np.maximum(np.maximum(MIB, UNDO_SHARE * whole), bucket)


def host_terms(job: TrainingJob, layouts: Layouts, frozen: Column, trained: Column) -> dict[str, Column]:
    """Return the bytes on the host of an optimizer that has left the device, keys of ``plan.terms.HOST_TERMS``.

    ``frozen`` are the parameters that have masters only, ``trained`` those with moments and gradients, too.
    """
    bucket = bucket_elements(job, layouts, trained)
    there = np.asarray(trained) > 0
    adds = accumulates(layouts)
    masters, moments = job.master_bytes * trained, moment_bytes(job) * trained
    if job.offload.optimizer == "nvme":
        masters, moments = (
            np.minimum(masters, buffers(job) * bucket * job.master_bytes),
            np.minimum(moments, buffers(job) * bucket * moment_bytes(job)),
        )
    # Frozen parameters' masters are in no bucket, and so in memory where the others are in files.
    masters = masters + job.master_bytes * frozen
    wire = wire_bytes(job, layouts) * (np.where(adds, 0.0, trained) + SPARE * bucket)
    return {
        "masters": masters,
        "moments": moments,
        "gradients": np.where(there, wire, 0.0),
        "totals": np.where(adds, job.master_bytes * trained, 0.0),
        "weights": np.where(there, _WEIGHTS * bucket * job.compute_bytes, 0.0),
        "copies": np.where(there, undo_bytes(job, layouts, trained), 0.0),
    }

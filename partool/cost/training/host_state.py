"""Sizes of a rank's training state in host memory and on disks, and of its buckets, as columns.

All sizes follow from a spec or a layout (``Job.offload``), so that plans and cost functions apply the same rules.
"""

from __future__ import annotations

import numpy as np

from partool.cost.case import Column, Layouts, Mask
from partool.spec.numbers import GIB, MIB
from partool.work.training import TrainingWork

BUFFERS = 4
"""Number of buckets in host memory when the state is on disks. One bucket is being updated, one read, one written, and
one is spare."""
BUCKET_BYTES = 64 * MIB
"""Size of a bucket of gradients: copies of this size run at the full rate of any host link (SuperOffload, arXiv
2509.21271)."""
_SMALLEST_BUCKET, _SMALLEST_ON_DISKS = 4 * MIB, MIB // 4
"""Minimum bytes of gradients per bucket, first without and then with state on disks. Smaller buckets add more time for
calls than they hide. The minimum on disks is lower, so that small models can be offloaded too."""
BUCKETS = 16
"""Minimum number of buckets per step, so that the host updates the first buckets before the last buckets arrive."""
UNDO_SHARE = 0.25
"""Ratio of the memory for copies of the state, with which updates are undone, to the memory of masters and moments; it
holds if the spec says ``auto``."""
SPARE, _WEIGHTS = 2, 2
"""Number of gradient buckets, and of weight buckets, that may be in transfer at once."""


def pinned_terms(job: TrainingWork) -> tuple[str, ...]:
    """Return the keys of ``plan.terms.HOST_TERMS`` whose memory is pinned because devices read or write it directly."""
    terms = ("gradients", "weights", "activations")
    return terms if job.offload.parameters == "nvme" else (*terms, "parameters")


def wire_bytes(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the bytes of one transferred gradient element; ``auto`` selects the compute type if no precision is lost.

    Where gradients are not summed over ranks, no precision is lost, as a backward pass produces gradients in the
    compute type.
    """
    if job.offload.gradients != "auto":
        return 0 * layouts.zero + (job.compute_bytes if job.offload.gradients == "bf16" else job.master_bytes)
    return np.where(np.asarray(layouts.world) == 1, job.compute_bytes, job.master_bytes)


def accumulates(layouts: Layouts) -> Mask:
    """Return True where the host sums the gradients of several micro-batches.

    Gradients arrive after each micro-batch if they are also reduced after each micro-batch, as with ZeRO-2 and ZeRO-3,
    or if a rank has no other ranks to reduce with. With replicas and with pipelines, gradients are summed on the device
    and sent once.
    """
    alone = layouts.dp * layouts.cp == 1
    return (layouts.accumulation > 1) & (layouts.replicas == 1) & (layouts.pp == 1) & (alone | (layouts.zero >= 2))


def waits_on_device(layouts: Layouts) -> Mask:
    """Return True where gradients stay on the device until the step's last backward pass has begun or has ended."""
    return (layouts.pp > 1) | ((layouts.accumulation > 1) & np.logical_not(accumulates(layouts)))


def moment_bytes(job: TrainingWork) -> float:
    """Return the bytes of host memory that all moments of one parameter take."""
    return job.moments * (2 if job.offload.moments == "bf16" else job.master_bytes)


def state_bytes(job: TrainingWork) -> float:
    """Return the bytes of host memory that the master and the moments of one parameter take."""
    return job.master_bytes + moment_bytes(job)


def buffers(job: TrainingWork) -> int:
    """Return the number of buckets that are in host memory at once when the state is on disks."""
    return BUFFERS if job.offload.buffers == "auto" else job.offload.buffers


def smallest_bucket(job: TrainingWork) -> int:
    """Return the minimum bytes of a bucket if the spec says ``auto`` for the bucket size."""
    return _SMALLEST_ON_DISKS if job.offload.optimizer == "nvme" else _SMALLEST_BUCKET


def bucket_elements(job: TrainingWork, layouts: Layouts, elements: Column) -> Column:
    """Return the number of gradient elements in a bucket.

    If the spec says ``auto``, a bucket has 64 MiB, or a smaller power of two if a step would have few buckets.
    """
    wire = wire_bytes(job, layouts)
    if job.offload.bucket_mib != "auto":
        size = int(job.offload.bucket_mib * MIB) + 0 * wire
    else:
        share = np.exp2(np.floor(np.log2(np.maximum(1.0, wire * elements / BUCKETS))))
        size = np.clip(share, smallest_bucket(job), BUCKET_BYTES)
    return np.minimum(size / wire, np.maximum(elements, 1.0))


def undo_bytes(job: TrainingWork, layouts: Layouts, elements: Column) -> Column:
    """Return the host bytes of the copies with which updates are undone; ``auto`` gives at least one bucket's copy."""
    if job.offload.speculate != "undo":
        return 0.0 * elements
    all_state_bytes = state_bytes(job) * elements
    if job.offload.undo_gib != "auto":
        return 0.0 * all_state_bytes + int(job.offload.undo_gib * GIB)
    # Shards begin at page boundaries, so small shards take more bytes than their elements.
    bucket = np.ceil(1.125 * state_bytes(job) * bucket_elements(job, layouts, elements))
    return np.maximum(np.maximum(MIB, UNDO_SHARE * all_state_bytes), bucket)


def host_terms(job: TrainingWork, layouts: Layouts, trained: Column) -> dict[str, Column]:
    """Return the host bytes of an offloaded optimizer, by key of ``plan.terms.HOST_TERMS``.

    ``trained`` is the number of parameters that have masters, moments and gradients; frozen ones have none of them.
    """
    bucket = bucket_elements(job, layouts, trained)
    trains = np.asarray(trained) > 0
    adds = accumulates(layouts)
    masters, moments = job.master_bytes * trained, moment_bytes(job) * trained
    if job.offload.optimizer == "nvme":
        masters, moments = (
            np.minimum(masters, buffers(job) * bucket * job.master_bytes),
            np.minimum(moments, buffers(job) * bucket * moment_bytes(job)),
        )
    wire = wire_bytes(job, layouts) * (np.where(adds, 0.0, trained) + SPARE * bucket)
    return {
        "masters": masters,
        "moments": moments,
        "gradients": np.where(trains, wire, 0.0),
        "totals": np.where(adds, job.master_bytes * trained, 0.0),
        "weights": np.where(trains, _WEIGHTS * bucket * job.compute_bytes, 0.0),
        "copies": np.where(trains, undo_bytes(job, layouts, trained), 0.0),
    }

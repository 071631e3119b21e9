"""What goes to host memory or to disks, and how the host's part of the work is done: what is pinned, and what follows.

Two optimizers per rank, one on the device and one on the host's cores, share the parameters: what is decided here is
how large the pieces are that travel between them, in which type, and how many cores take part.
"""

from __future__ import annotations

from math import log2
from typing import Any

from partool.cost.case import Layouts
from partool.plan.types import HostWork
from partool.planner.problem import Problem

MIB, GIB = 2**20, 2**30
BUCKET_BYTES = 64 * MIB
"""Of gradients: copies of as much run at the full rate of any host link (SuperOffload, arXiv 2509.21271)."""
_SMALLEST_BUCKET_BYTES = 4 * MIB
_BUCKETS = 16
"""A step has so many buckets at least, that the first are worked on while the last are not there yet."""
BUFFERS = 4
"""Buckets of a state on disks in host memory: one that is stepped, one that is read, one that is written, one spare."""
_CORES_KEPT = 2
"""Of a rank's cores: for training's own thread and the data loader."""
_STATE_SHARE = 0.25
"""Of masters and moments, what copies of the state may take where ``undo_gib`` is open."""


def fields(problem: Problem, row: Layouts) -> dict[str, Any]:
    """Return the fields of a layout that say what leaves the device, of a row whose columns are single numbers."""
    host, offload = float(row.host_optimizer), problem.spec.parallel.offload
    found: dict[str, Any] = {
        "offload_optimizer": problem.optimizer_tier if host > 0 else "none",
        "gpu_fraction": round(1.0 - host, 6) if host > 0 else 0.0,
        "offload_parameters": ("nvme" if offload.parameters == "nvme" else "cpu") if row.host_parameters else "none",
        "offload_activations": "cpu" if row.host_activations else "none",
    }
    if any(found[name] != "none" for name in ("offload_optimizer", "offload_parameters", "offload_activations")):
        found["host"] = work(problem, row, found)
    return found


def work(problem: Problem, row: Layouts, moved: dict[str, Any]) -> HostWork:
    """Return how the host's part of the work is done, where ``moved`` says what leaves the device."""
    offload, pinned = problem.spec.parallel.offload, problem.spec.parallel.offload.pinned_gib
    found: dict[str, Any] = {"pinned_bytes": 0 if pinned == "auto" else int(pinned * GIB)}
    if "nvme" in (moved["offload_optimizer"], moved["offload_parameters"]):
        found["folder"] = offload.dir or ""
        found["buffers"] = BUFFERS if offload.buffers == "auto" else offload.buffers
    if moved["offload_optimizer"] == "none":
        return HostWork(**found)
    elements = owned(problem, row)
    speculate = speculation(problem)
    gradients = travels(problem, row)
    return HostWork(
        **found,
        speculate=speculate,
        undo_bytes=_undo_bytes(problem, elements) if speculate == "undo" else 0,
        gradients=gradients,
        moments="bf16" if offload.moments == "bf16" else "master",
        bucket_bytes=_bucket_bytes(problem, elements, gradients),
        threads=threads(problem),
    )


def speculation(problem: Problem) -> Any:
    """Return whether the host steps before the norm is known; by itself always, for it changes nothing but time."""
    asked = problem.spec.parallel.offload.speculate
    return "deferred" if asked in ("auto", True) else "undo" if asked == "undo" else "none"


def travels(problem: Problem, row: Layouts) -> Any:
    """Return the type in which gradients travel: that of computation where it loses nothing, or the spec asks for it.

    It loses nothing where no sum over ranks made them: what one rank's backward pass leaves is of that type already.
    """
    asked = problem.spec.parallel.offload.gradients
    if asked != "auto":
        return "compute" if asked == "bf16" else "master"
    return "compute" if int(row.world) == 1 else "master"


def threads(problem: Problem) -> int:
    """Return a rank's cores for the host's optimizer; on a CPU, where training needs them more, a quarter."""
    asked = problem.spec.parallel.offload.threads
    if asked != "auto":
        return asked
    devices = problem.devices
    if devices.backend == "cpu":
        return max(1, devices.threads_per_rank // 4)
    return max(1, devices.host_cores // devices.per_node - _CORES_KEPT)


def owned(problem: Problem, row: Layouts) -> float:
    """Return the parameters whose state a rank has, with layers split evenly over pipeline ranks."""
    shards = float(row.shards * row.cp) if row.zero else 1.0
    return problem.parameters / (float(row.pp) * float(row.tp) * shards)


def _undo_bytes(problem: Problem, elements: float) -> int:
    asked = problem.spec.parallel.offload.undo_gib
    if asked != "auto":
        return int(asked * GIB)
    return max(MIB, int(_STATE_SHARE * 3 * problem.job.master_bytes * elements))


def _bucket_bytes(problem: Problem, elements: float, gradients: str) -> int:
    """Return the size of a bucket: 64 MiB, or less by powers of two where a rank would have few of them."""
    asked = problem.spec.parallel.offload.bucket_mib
    if asked != "auto":
        return int(asked * MIB)
    size = problem.job.compute_bytes if gradients == "compute" else problem.job.master_bytes
    share = max(1.0, size * elements / _BUCKETS)
    return int(min(BUCKET_BYTES, max(_SMALLEST_BUCKET_BYTES, 2 ** int(log2(share)))))

"""Fields of a layout for offload to host memory or disks; values are set by the spec, or follow from other fields.

Each rank's parameters may be divided between two optimizers, one on the device and one on the host's cores. The size
and type of the buckets sent between device and host are decided in :mod:`partool.cost.training.host_state`, which
counts their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partool.cost.case import Layouts
from partool.cost.training import host_state
from partool.cost.training.predict import predict_time
from partool.plan.layout import OffloadLayout
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.planner.search.price import TIE, Priced
from partool.spec.numbers import GIB, MIB
from partool.strategies.optimizers import OPTIMIZERS

_CORES_KEPT = 2
"""Number of each rank's cores that are kept for the training thread and the data loader."""


def resolved(problem: Problem, row: Layouts) -> OffloadLayout:
    """Return what a single layout (one row) offloads, and the settings of the optimizer's update on the host."""
    stays, asked = round(float(row.gpu_fraction), 6), problem.offload
    offload = OffloadLayout(
        optimizer="none" if stays == 1.0 else "nvme" if asked.optimizer == "nvme" else "cpu",
        gpu_fraction=stays,
        parameters="none" if not row.offload_parameters else "nvme" if asked.parameters == "nvme" else "cpu",
        activations="cpu" if row.offload_activations else "none",
        pinned_gib=None if asked.pinned_gib == "auto" else asked.pinned_gib,
    )
    if "nvme" in (offload.optimizer, offload.parameters):
        buffers = host_state.buffers(cost_job(problem))
        offload = offload.model_copy(update={"dir": asked.dir, "buffers": buffers})
    if offload.optimizer != "none":
        return _with_host_optimizer(problem, row, offload)
    return offload if offload.active else OffloadLayout()


def _with_host_optimizer(problem: Problem, row: Layouts, offload: OffloadLayout) -> OffloadLayout:
    """Return ``offload`` with the settings of the host's optimizer."""
    asked, job = problem.offload, cost_job(problem)
    elements = owned(problem, row) * (1.0 - offload.gpu_fraction)
    wire = int(host_state.wire_bytes(job, row))
    if asked.bucket_mib == "auto":
        fitting = int(wire * float(host_state.bucket_elements(job, row, elements)))
        bucket_bytes = max(host_state.smallest_bucket(job), fitting)
    else:
        bucket_bytes = int(asked.bucket_mib * MIB)
    return offload.model_copy(
        update={
            "speculate": True if asked.speculate == "auto" else asked.speculate,
            "undo_gib": int(host_state.undo_bytes(job, row, elements)) / GIB,
            "gradients": "bf16" if asked.gradients == "bf16" or wire == job.compute_bytes else "fp32",
            "moments": "bf16" if asked.moments == "bf16" else "fp32",
            "bucket_mib": bucket_bytes / MIB,
            "threads": threads(problem),
        }
    )


def threads(problem: Problem) -> int:
    """Return the number of a rank's cores that the host's optimizer uses.

    Unless the spec sets the number, it is all but ``_CORES_KEPT`` cores, or a quarter if training runs on the CPU.
    """
    asked = problem.spec.parallel.offload.threads
    if asked != "auto":
        return asked
    devices = problem.devices
    if devices.backend == "cpu":
        return max(1, devices.threads_per_rank // 4)
    return max(1, devices.host_cores // devices.per_node - _CORES_KEPT)


def owned(problem: Problem, row: Layouts) -> float:
    """Return the number of parameters whose moments a rank holds if layers are split evenly over pipeline ranks."""
    return problem.trained / sharing(row)


def sharing(row: Layouts) -> float:
    """Return the number of ranks that share one copy of the training state."""
    return float(row.pp) * float(row.tp) * (float(row.shards * row.cp) if row.zero else 1.0)


def to_disks(problem: Problem) -> Problem | None:
    """Return the problem with the optimizer's state in files; None if the state is or must not be in files."""
    offload = problem.spec.parallel.offload
    can_use_disks = offload.optimizer == "auto" and offload.dir is not None and problem.host_link
    can_use_disks = can_use_disks and OPTIMIZERS[problem.spec.optimizer.name].host
    return problem.relax("disks") if can_use_disks and "disks" not in problem.relaxed else None


def sentences(problem: Problem, priced: Priced) -> Iterator[str]:
    """Yield sentences on what is offloaded to host memory and disks, and why."""
    layout, asked, memory = priced.layout, problem.spec.parallel.offload, priced.memory
    waits = priced.terms_s.get("offload", 0.0) / priced.step_time_s
    if layout.offload.optimizer != "none":
        yield _optimizer(priced, pinned=asked.optimizer != "auto", waits=waits)
        yield _update(priced)
    if layout.offload.parameters != "none":
        why = "the spec asks for it; " if asked.parameters != "auto" else ""
        where = "files" if layout.offload.parameters == "nvme" else "host memory"
        yield f"Parameters in {where}: {why}each layer's come to the device before its two passes."
    if layout.offload.activations != "none":
        as_asked = ", as the spec asks" if asked.activations == "cpu" else ""
        yield f"Activations in host memory{as_asked}: {waits:.1%} of the step waits for what goes there and back."
    if memory.pinned_bytes and problem.host_link:
        yield f"Pinned memory: {memory.pinned_bytes / GIB:.1f} GiB of each rank, taken before the first step."


def _optimizer(priced: Priced, *, pinned: bool, waits: float) -> str:
    layout = priced.layout
    where = f"files under {layout.offload.dir}" if layout.offload.optimizer == "nvme" else "host memory"
    stays = f"{layout.offload.gpu_fraction:.0%} stays, of what the backward pass reaches last"
    facts = ["the spec asks for it"] * pinned + [stays] * bool(layout.offload.gpu_fraction)
    facts.append(f"{waits:.1%} of the step waits for it")
    return f"Optimizer state in {where}: {'; '.join(facts)}."


def _update(priced: Priced) -> str:
    offload = priced.layout.offload
    when = "after the norm of the gradients is known"
    if offload.speculate == "undo":
        when = f"as gradients arrive, with {offload.undo_gib:.2g} GiB of copies to go back to"
    elif offload.speculate:
        when = "as gradients arrive; masters and moments change once their norm is known"
    wide = "as they are computed" if offload.gradients == "bf16" else "as wide as masters"
    cores = f"{offload.threads} core{'s' * (offload.threads > 1)}"
    said = f"Update on {cores} per rank {when}. Gradients travel {wide}, {offload.bucket_mib:.3g} MiB at a time."
    paused_s = _paused_s(priced)
    if paused_s <= priced.step_time_s * (1.0 + TIE):
        return said
    return (
        f"{said} While most steps clip, updates wait for the norm: {paused_s:.3g} s a step, which the price leaves out."
    )


def _paused_s(priced: Priced) -> float:
    """Return the seconds that a step takes while speculation is paused after failures; 0.0 without speculation."""
    job, training = priced.job, priced.problem.spec.training
    if job.offload.speculate is False or not priced.problem.spec.optimizer.clip:
        return 0.0
    waiting = replace(job, offload=job.offload.model_copy(update={"speculate": False}))
    return predict_time(waiting, priced.layout, training.steps).step_time_s

"""What goes to host memory or to disks, as fields of a layout: what is pinned, and what follows.

Two optimizers per rank, one on the device and one on the host's cores, may share the parameters. How large the pieces
are that travel between them, and in which type, is decided where it is counted: :mod:`partool.cost.tiers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

from partool.cost import host_state, tiers
from partool.cost.bound import hidden_share
from partool.cost.case import Layouts
from partool.cost.columns import columns
from partool.cost.time import predict_time
from partool.plan.types import HostWork
from partool.planner.cost_job import cost_job
from partool.planner.price import Priced
from partool.planner.problem import Problem
from partool.planner.words import GIB, TIE

_CORES_KEPT = 2
"""Of a rank's cores: for training's own thread and the data loader."""
_MOST = 0.95
_SHARES = (0.75, 0.5, 0.25)
"""Of the optimizer's state, what may stay on a device that has no room for what would hide the host's last work."""


def fields(problem: Problem, row: Layouts) -> dict[str, Any]:
    """Return the fields of a layout that say what leaves the device, of a row whose columns are single numbers."""
    host, asked = float(row.host_optimizer), problem.tiers
    found: dict[str, Any] = {
        "offload_optimizer": asked.optimizer if host > 0 else "none",
        "gpu_fraction": round(1.0 - host, 6) if host > 0 else 0.0,
        "offload_parameters": asked.parameters if row.host_parameters else "none",
        "offload_activations": "cpu" if row.host_activations else "none",
    }
    if any(found[name] != "none" for name in ("offload_optimizer", "offload_parameters", "offload_activations")):
        found["host"] = work(problem, row, found)
    return found


def work(problem: Problem, row: Layouts, moved: dict[str, Any]) -> HostWork:
    """Return how the host's part of the work is done, where ``moved`` says what leaves the device."""
    offload, asked, job = problem.spec.parallel.offload, problem.tiers, cost_job(problem)
    found: dict[str, Any] = {}
    if offload.pinned_gib != "auto":
        found["pinned_bytes"] = int(offload.pinned_gib * tiers.GIB)
    if "nvme" in (moved["offload_optimizer"], moved["offload_parameters"]):
        found |= {"folder": offload.dir or "", "buffers": asked.buffers}
    if moved["offload_optimizer"] == "none":
        return HostWork(**found)
    elements = owned(problem, row) * (1.0 - moved["gpu_fraction"])
    wire = int(host_state.wire_bytes(job, row))
    bucket = float(host_state.bucket_elements(job, row, elements)) if not asked.bucket_bytes else 0.0
    return HostWork(
        **found,
        speculate=asked.speculate,
        undo_bytes=int(host_state.undo_bytes(job, row, elements)),
        gradients="compute" if asked.gradients == "compute" or wire == job.compute_bytes else "master",
        moments="bf16" if asked.narrow_moments else "master",
        bucket_bytes=asked.bucket_bytes or max(host_state.smallest_bucket(asked), int(wire * bucket)),
        threads=threads(problem),
    )


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
    """Return the parameters whose moments a rank has, with layers split evenly over pipeline ranks."""
    return problem.trained / sharing(row)


def sharing(row: Layouts) -> float:
    """Return the ranks that share one copy of the training state."""
    return float(row.pp) * float(row.tp) * (float(row.shards * row.cp) if row.zero else 1.0)


def in_parts(problem: Problem) -> Problem | None:
    """Return the problem with state on both sides where it has to leave the device; None where that changes nothing."""
    offload = problem.spec.parallel.offload
    may = offload.optimizer in ("cpu", "nvme") and offload.gpu_fraction == "auto" and problem.host_link
    return problem.relax("split") if may and "split" not in problem.relaxed else None


def to_disks(problem: Problem) -> Problem | None:
    """Return the problem with the optimizer's state in files; None where it is there already, or may not be."""
    offload = problem.spec.parallel.offload
    may = offload.optimizer == "auto" and offload.dir is not None and problem.host_link
    return problem.relax("disks") if may and "disks" not in problem.relaxed else None


def refined(priced: Priced) -> Priced:
    """Return a layout with as much of the optimizer's state on the device as hides the host's last work, if that fits.

    Searches try few shares; this one follows from the times of the layout itself.
    """
    problem, layout = priced.problem, priced.layout
    open_ = problem.spec.parallel.offload.gpu_fraction == "auto" and problem.host_link
    if layout.offload_optimizer == "none" or layout.offload_parameters != "none" or not open_:
        return priced
    least = ceil(100.0 * hidden_share(priced.job, columns(layout))) / 100.0
    best = priced
    for share in (least, *_SHARES):
        if not layout.gpu_fraction < share <= min(least, _MOST):
            continue
        row = replace(columns(layout), host_optimizer=round(1.0 - share, 6))
        other = Priced(problem, layout.model_copy(update=fields(problem, row)))
        if not other.fits or other.safe < priced.safe:
            continue
        quicker = other.time.step_time_s < best.time.step_time_s * (1.0 - TIE)
        if quicker or (share == least and other.time.step_time_s <= priced.time.step_time_s * (1.0 + TIE)):
            best = other
        if share == least:
            break
    return best


def sentences(problem: Problem, priced: Priced) -> Iterator[str]:
    """Say what lives in host memory and on disks, and why."""
    layout, asked, memory = priced.layout, problem.spec.parallel.offload, priced.memory
    waits = priced.time.terms_s.get("offload", 0.0) / priced.time.step_time_s
    if layout.offload_optimizer != "none":
        yield _optimizer(priced, pinned=asked.optimizer != "auto", waits=waits)
        yield _update(priced)
    if layout.offload_parameters != "none":
        why = (
            "the spec asks for it" if asked.parameters != "auto" else "layouts that keep them do not fit, or are slower"
        )
        where = "files" if layout.offload_parameters == "nvme" else "host memory"
        yield f"Parameters in {where}: {why}; each layer's come to the device before its two passes."
    if layout.offload_activations != "none":
        told = ", as the spec asks" if asked.activations == "cpu" else ""
        yield f"Activations in host memory{told}: {waits:.1%} of the step waits for what goes there and back."
    if memory.pinned_bytes and problem.host_link:
        yield f"Pinned memory: {memory.pinned_bytes / GIB:.1f} GiB of each rank, taken before the first step."


def _optimizer(priced: Priced, *, pinned: bool, waits: float) -> str:
    layout = priced.layout
    where = f"files under {layout.host.folder}" if layout.offload_optimizer == "nvme" else "host memory"
    why = "the spec asks for it" if pinned else "layouts that keep it do not fit, or are slower"
    stays = f"; {layout.gpu_fraction:.0%} stays, of what the backward pass reaches last" if layout.gpu_fraction else ""
    return f"Optimizer state in {where}: {why}{stays}. {waits:.1%} of the step waits for it."


def _update(priced: Priced) -> str:
    work = priced.layout.host
    when = {
        "none": "after the norm of the gradients is known",
        "deferred": "as gradients arrive; masters and moments change once their norm is known",
        "undo": f"as gradients arrive, with {work.undo_bytes / GIB:.2g} GiB of copies to go back to",
    }[work.speculate]
    wide = "as they are computed" if work.gradients == "compute" else "as wide as masters"
    cores = f"{work.threads} core{'s' * (work.threads > 1)}"
    size = work.bucket_bytes / tiers.MIB
    said = f"Update on {cores} per rank {when}. Gradients travel {wide}, {size:.3g} MiB at a time."
    paused_s = _paused_s(priced)
    if paused_s <= priced.time.step_time_s * (1.0 + TIE):
        return said
    return (
        f"{said} While most steps clip, updates wait for the norm: {paused_s:.3g} s a step, which the price leaves out."
    )


def _paused_s(priced: Priced) -> float:
    """Return the seconds of a step while so many guesses fail that the runtime makes none; 0.0 where none can."""
    job, training = priced.job, priced.problem.spec.training
    if job.tiers.speculate == "none" or not priced.problem.spec.optimizer.clip:
        return 0.0
    waiting = replace(job, tiers=replace(job.tiers, speculate="none"))
    return predict_time(waiting, priced.layout, training.steps).step_time_s

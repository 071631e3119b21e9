"""Checks that host memory and disks can hold what a layout offloads, within the limits of the spec."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from math import ceil, floor, log10
from pathlib import Path

from partool.cost.codec import encode
from partool.cost.training import host_state
from partool.diagnostics.record import Diagnostic
from partool.plan.layout import Layout
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.planner.rules.launching import trains_here
from partool.planner.search.offload import owned, sharing
from partool.planner.search.price import Priced
from partool.spec.numbers import GIB
from partool.spec.parallel import Offload

_OFFLOAD = ("parallel", "offload")


def check_layout(problem: Problem, priced: Priced) -> Iterator[Diagnostic]:
    """Yield findings, with sizes, if host memory or disks are too small for the data that a layout offloads."""
    layout = priced.layout
    if layout.offload.active:
        yield from _pinned(problem, priced)
    if layout.offload.optimizer == "none" and problem.spec.parallel.offload.optimizer == "auto":
        yield from _unused(problem)
    if "nvme" in (layout.offload.optimizer, layout.offload.parameters):
        yield from _disk(problem, priced)
    if layout.offload.optimizer == "nvme":
        yield from _buffers(problem, priced)
    if layout.offload.speculate == "undo" and layout.offload.optimizer != "none":
        yield from _copies(problem, layout)


def _pinned(problem: Problem, priced: Priced) -> Iterator[Diagnostic]:
    """Yield a finding if the spec's limit on pinned memory is below the pinned memory that a rank needs."""
    limit, layout, parts = priced.layout.offload.pinned_limit_bytes, priced.layout, priced.pinned_parts
    least = sum(parts.values())
    if not limit or least <= limit:
        return
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    asked = problem.spec.parallel.offload
    message = (
        f"pinned_gib: {asked.pinned_gib:g} is less than the {_gib(least)} GiB that each rank needs (GiB: {listed})"
    )
    # Open fields have been searched already, so only pinned fields are proposed for change.
    less = [f"{name}: none" for name in ("activations", "parameters") if parts.get(name) and _asked(asked, name)]
    if parts.get("gradients") and asked.gpu_fraction != "auto":
        less.append("a larger gpu_fraction")
    help = ", or ".join([f"use pinned_gib: {_rounded_up(least / GIB)}", *less])
    wide = layout.offload.gradients == "fp32" and priced.job.compute_bytes < priced.job.master_bytes
    if max(parts, key=lambda name: parts[name]) == "gradients" and wide:
        help += "; gradients: bf16 halves what they take, and rounds them"
    yield Diagnostic("PT473", message, path=(*_OFFLOAD, "pinned_gib"), help=help)


def _unused(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about settings for an offloaded optimizer state that the plan keeps on the device instead."""
    asked = problem.spec.parallel.offload
    for name in ("gpu_fraction", "speculate", "undo_gib", "moments"):
        if name not in asked.model_fields_set or getattr(asked, name) == "auto":
            continue
        value = str(getattr(asked, name))
        value = value.lower() if value in ("True", "False") else value
        message = f"{name}: {value} changes nothing: the plan keeps the optimizer's state on the device"
        help = "drop it, or use optimizer: cpu"
        yield Diagnostic("PT497", message, severity="warning", path=(*_OFFLOAD, name), help=help)


def _asked(offload: Offload, name: str) -> bool:
    """Return True if the spec explicitly offloads the part ``name`` (such as ``optimizer``)."""
    return getattr(offload, name) not in ("auto", "none")


def _gib(size_bytes: float) -> str:
    """Return text that gives ``size_bytes`` in GiB with three significant digits."""
    value = size_bytes / GIB
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _rounded_up(value: float) -> str:
    """Return a number rounded up to two significant digits."""
    step = 10.0 ** (floor(log10(value)) - 1)
    return f"{round(ceil(value / step) * step, 9):g}"


def _disk(problem: Problem, priced: Priced) -> Iterator[Diagnostic]:
    """Yield a finding if a disk of this machine is too small for the files of all ranks."""
    layout, devices = priced.layout, problem.devices
    sizes = {"the optimizer's state": _state_bytes(problem, priced), "parameters": _shard_bytes(problem, priced)}
    size = sum(sizes.values()) * devices.per_node
    folder = Path(layout.offload.dir or "")
    if trains_here(problem.spec) and devices.nodes == 1 and folder.is_dir():
        free = shutil.disk_usage(folder).free
        if free < size:
            kept = [name for name, bytes in sizes.items() if bytes]
            take = "takes" if kept == ["the optimizer's state"] else "take"
            message = f"dir: {folder} has {_gib(free)} GiB free, {' and '.join(kept)} {take} {_gib(size)}"
            help = "name a folder on a larger disk"
            if layout.offload.optimizer == "nvme":
                help += ", or use moments: bf16"
            yield Diagnostic("PT487", message, path=(*_OFFLOAD, "dir"), help=help)


def _state_bytes(problem: Problem, priced: Priced) -> float:
    """Return the bytes of a rank's master weights and moments in files; 0 if optimizer state is not on disks."""
    row = encode(priced.layout)
    on_disks = priced.layout.offload.optimizer == "nvme"
    return (
        host_state.state_bytes(priced.job) * owned(problem, row) * (1.0 - float(row.gpu_fraction)) if on_disks else 0.0
    )


def _shard_bytes(problem: Problem, priced: Priced) -> float:
    """Return the bytes of a rank's parameters in files, frozen ones included; 0 if parameters are not on disks."""
    on_disks = priced.layout.offload.parameters == "nvme"
    return priced.job.compute_bytes * problem.parameters / sharing(encode(priced.layout)) if on_disks else 0.0


def _buffers(problem: Problem, priced: Priced) -> Iterator[Diagnostic]:
    """Yield a finding if host buffers can hold the whole optimizer state; files are then useless."""
    layout, state_bytes = priced.layout, _state_bytes(problem, priced)
    buffered_bytes = sum(priced.memory.host_terms_bytes.get(name, 0) for name in ("masters", "moments"))
    asked = problem.spec.parallel.offload
    if buffered_bytes >= 0.99 * state_bytes:
        message = f"{layout.offload.buffers} buckets of {layout.offload.bucket_mib:.3g} MiB hold all of the state"
        smaller = "" if (asked.bucket_mib, asked.buffers) == ("auto", "auto") else "a smaller bucket_mib, or "
        help = f"use {smaller}optimizer: cpu, which does as much without disks"
        yield Diagnostic("PT478", message, severity="warning", path=(*_OFFLOAD, "optimizer"), help=help)


def _copies(problem: Problem, layout: Layout) -> Iterator[Diagnostic]:
    """Yield a finding if the undo buffer (``undo_gib``) cannot hold the optimizer state of a single bucket."""
    work, job = layout.offload, cost_job(problem, layout.compile)
    wire = job.compute_bytes if work.gradients == "bf16" else job.master_bytes
    bucket = min(work.bucket_bytes / wire, owned(problem, encode(layout))) * host_state.state_bytes(job)
    if work.undo_bytes >= bucket:
        return
    message = (
        f"undo_gib: {work.undo_bytes / GIB:.3g} holds no bucket's state, which takes {bucket / GIB:.3g}: "
        "every bucket would wait for the norm"
    )
    help = "use a larger undo_gib, a smaller bucket_mib, or speculate: true"
    yield Diagnostic("PT488", message, severity="warning", path=(*_OFFLOAD, "undo_gib"), help=help)

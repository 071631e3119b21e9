"""Checks that the model and the machines allow the offload to host memory and disks that a spec sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.planner.rules.launching import trains_here
from partool.spec.spec import Spec

_OFFLOAD = ("parallel", "offload")
_PARTS = ("optimizer", "parameters", "activations")


def with_folder(spec: Spec, base_dir: Path) -> Spec:
    """Return a spec with an absolute offload folder; a relative path starts from ``base_dir``."""
    folder = spec.parallel.offload.dir
    if folder is None:
        return spec
    offload = spec.parallel.offload.model_copy(update={"dir": str((base_dir / folder).absolute())})
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"offload": offload})})


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about offload settings that the machines cannot meet.

    Also yield a warning if nothing is offloaded because of ``gpu_fraction: 1.0``.
    """
    yield from _apart(problem)
    yield from _threads(problem)
    yield from _folder(problem)
    offload = problem.spec.parallel.offload
    if offload.gpu_fraction == 1.0:
        message = "gpu_fraction: 1.0 leaves all of the optimizer's state on the device"
        path = (*_OFFLOAD, "gpu_fraction")
        yield Diagnostic("PT494", message, severity="warning", path=path, help="use a smaller one, or optimizer: none")


def _apart(problem: Problem) -> Iterator[Diagnostic]:
    offload, devices = problem.spec.parallel.offload, problem.devices
    for name in _PARTS:
        tier = getattr(offload, name)
        if tier in ("auto", "none") or problem.host_link:
            continue
        message = f"offload.{name}: {tier}, but {devices.accelerator} has no host memory apart from its own"
        path, help = (*_OFFLOAD, name), f"use {name}: none, or auto"
        if devices.backend != "cpu":
            yield Diagnostic("PT274", message, path=path, help=help)
        elif tier == "cpu":
            what = f"{devices.accelerator} has no memory apart from the host's"
            message = f"offload.{name}: cpu saves nothing here: {what}"
            yield Diagnostic("PT274", message, severity="warning", path=path, help=f"{help}, but for a trial")


def _threads(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the spec sets more threads for the host's optimizer than a rank has cores."""
    asked, devices = problem.spec.parallel.offload.threads, problem.devices
    cores = devices.threads_per_rank if devices.backend == "cpu" else devices.host_cores // devices.per_node
    if asked == "auto" or cores == 0 or asked <= cores:
        return
    message = f"threads: {asked} for the update, but each of a node's {devices.per_node} ranks has {cores} cores"
    help = f"use at most {max(1, cores - 1)}, or auto"
    yield Diagnostic("PT474", message, path=(*_OFFLOAD, "threads"), help=help)


def _folder(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if training runs on this machine and the offload folder is missing or not writable."""
    offload, devices = problem.spec.parallel.offload, problem.devices
    here = trains_here(problem.spec) and devices.nodes == 1
    if not here or offload.dir is None or "nvme" not in (offload.optimizer, offload.parameters):
        return
    folder, path = Path(offload.dir), (*_OFFLOAD, "dir")
    if not folder.is_dir():
        wrong = "is not a folder" if folder.exists() else "does not exist"
        help = "make it before the run starts, or name another one"
        yield Diagnostic("PT667", f"{folder} {wrong} on this machine", severity="warning", path=path, help=help)
    elif not os.access(folder, os.W_OK | os.X_OK):
        message = f"{folder} cannot be written on this machine"
        yield Diagnostic("PT668", message, severity="warning", path=path, help="make it writable, or name another one")

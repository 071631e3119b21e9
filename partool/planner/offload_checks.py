"""What a spec may not ask of host memory and disks, given the model and the machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.spec.spec import Spec

_OFFLOAD = ("parallel", "offload")
_PARTS = ("optimizer", "parameters", "activations")


def with_folder(spec: Spec, base_dir: Path) -> Spec:
    """Return a spec whose folder on disks is absolute; relative ones start from ``base_dir``."""
    folder = spec.parallel.offload.dir
    if folder is None:
        return spec
    offload = spec.parallel.offload.model_copy(update={"dir": str((base_dir / folder).absolute())})
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"offload": offload})})


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Find what goes to a host memory that is not there."""
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
            message = (
                f"offload.{name}: cpu saves nothing here: {devices.accelerator} has no memory apart from the host's"
            )
            yield Diagnostic("PT274", message, severity="warning", path=path, help=f"{help}, but for a trial")

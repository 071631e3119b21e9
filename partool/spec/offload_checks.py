"""Rules of the ``parallel.offload`` section that need neither the model nor the machines."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic, Severity
from partool.spec.spec import Spec
from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import MOVING_WEIGHTS

_PATH = ("parallel", "offload")
OF_THE_OPTIMIZER = ("speculate", "undo_gib", "gradients", "moments", "bucket_mib", "threads")
"""Fields about the optimizer's update on the host; they have no effect if the optimizer stays on the device."""


def check_offload(spec: Spec) -> Iterator[Diagnostic]:
    """Yield the findings about state that a spec keeps in host memory or on disks."""
    yield from _host_pass(spec)
    yield from _together(spec)
    yield from _schedule(spec)
    yield from _disks(spec)
    yield from _update(spec)
    yield from _types(spec)


def _host_pass(spec: Spec) -> Iterator[Diagnostic]:
    """Yield an error if state is offloaded but the optimizer can only update parameters on the device."""
    name = spec.optimizer.name
    for part in () if OPTIMIZERS[name].host else ("optimizer", "parameters"):
        if (tier := getattr(spec.parallel.offload, part)) not in ("auto", "none"):
            message = f"{part}: {tier}, but {name} has no pass in host memory: it steps on the device only"
            others = " or ".join(other for other, record in OPTIMIZERS.items() if record.host)
            help = f"use {part}: none, or optimizer: {{name: {others}}}"
            yield Diagnostic("PT224", message, path=(*_PATH, part), help=help)


def _together(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for offloaded parameters that do not suit the ZeRO stage or the place of the optimizer state."""
    offload, zero = spec.parallel.offload, spec.parallel.data.zero
    if offload.gpu_fraction != "auto" and offload.optimizer == "none":
        message = f"gpu_fraction: {offload.gpu_fraction} splits an optimizer state that offload leaves on the device"
        path = (*_PATH, "gpu_fraction")
        yield Diagnostic("PT224", message, path=path, help="set optimizer: cpu, or drop gpu_fraction")
    if offload.parameters in ("auto", "none"):
        return
    if offload.gpu_fraction not in ("auto", 0.0):
        message = f"gpu_fraction: {offload.gpu_fraction:g} updates weights on the device, but they are offloaded"
        help = "use gpu_fraction: 0, or parameters: none"
        yield Diagnostic("PT236", message, path=(*_PATH, "gpu_fraction"), help=help)
    path, tier = (*_PATH, "parameters"), offload.parameters
    where = "host memory" if tier == "cpu" else "files"
    if zero not in ("auto", 3):
        message = f"parameters can be kept in {where} with zero: 3 only, not with zero: {zero}"
        yield Diagnostic("PT224", message, path=path, help="set data: {zero: 3}, or parameters: none")
    if offload.optimizer == "none":
        message = f"parameters cannot be in {where} while the optimizer that updates them is not"
        yield Diagnostic("PT224", message, path=path, help=f"set optimizer: {tier}, or parameters: none")


def _schedule(spec: Spec) -> Iterator[Diagnostic]:
    offload, schedule = spec.parallel.offload, spec.parallel.pipeline.schedule
    if schedule not in MOVING_WEIGHTS:
        return
    for name in ("optimizer", "parameters", "activations"):
        if (tier := getattr(offload, name)) not in ("auto", "none"):
            message = f"{name}: {tier}, but schedule: {schedule} sends weights from device to device"
            help = f"use {name}: none, or schedule: 1f1b"
            yield Diagnostic("PT234", message, path=(*_PATH, name), help=help)


def _disks(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for state on disks without ``dir``, and for ``dir`` or ``buffers`` without state on disks."""
    offload = spec.parallel.offload
    tiers = (offload.optimizer, offload.parameters)
    if "nvme" in tiers and offload.dir is None:
        name = "optimizer" if offload.optimizer == "nvme" else "parameters"
        message = f"{name}: nvme, but no folder is named for the files"
        yield Diagnostic("PT230", message, path=(*_PATH, name), help="add dir: /FOLDER on a local disk, or use cpu")
    if "nvme" in tiers or "auto" in tiers[:1]:
        return
    for name in ("dir", "buffers"):
        if (value := getattr(offload, name)) not in (None, "auto"):
            message = f"{name}: {value} is for files, but nothing is kept in files"
            # Only a warning for dir: users switch between nvme and cpu to compare plans, and leave dir as it is.
            kind: Severity = "warning" if name == "dir" else "error"
            help = f"set optimizer: nvme, or drop {name}"
            yield Diagnostic("PT231", message, severity=kind, path=(*_PATH, name), help=help)


def _update(spec: Spec) -> Iterator[Diagnostic]:
    """Yield findings about settings without effect: the host's update is not used, or ``speculate`` is not ``undo``."""
    offload = spec.parallel.offload
    if offload.optimizer == "none":
        for name in OF_THE_OPTIMIZER:
            if (value := getattr(offload, name)) != "auto" and value is not False:
                text = str(value).lower() if isinstance(value, bool) else value
                message = f"{name}: {text} is for updates on the host, but the optimizer stays on the device"
                yield Diagnostic("PT232", message, path=(*_PATH, name), help=f"set optimizer: cpu, or drop {name}")
    elif offload.undo_gib != "auto" and offload.speculate != "undo":
        message = f"undo_gib: {offload.undo_gib:g} is for copies that only speculate: undo makes"
        yield Diagnostic("PT233", message, path=(*_PATH, "undo_gib"), help="set speculate: undo, or drop undo_gib")


def _types(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for types of offloaded gradients or moments that do not suit the run's precision."""
    offload, precision = spec.parallel.offload, spec.training.precision
    if offload.gradients == "bf16" and precision in ("fp32", "fp64"):
        message = f"gradients: bf16, but precision: {precision} makes gradients of {precision}"
        yield Diagnostic("PT235", message, path=(*_PATH, "gradients"), help="use gradients: auto, or precision: bf16")
    for name in ("gradients", "moments"):
        if getattr(offload, name) == "fp32" and precision == "fp64":
            message = f"{name}: fp32 has fewer digits than precision: fp64"
            yield Diagnostic("PT235", message, path=(*_PATH, name), help=f"use {name}: auto, or precision: fp32")

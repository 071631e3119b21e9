"""Turns the ``hardware`` section into :class:`Devices`; figures come from the spec, the catalog or this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from partool.catalog.devices import CPU_SPEED, accelerator, cpu, own_entry, part_of
from partool.catalog.lookup import did_you_mean, table
from partool.catalog.machine import catalog_name, this_machine
from partool.catalog.slices import check_slice, sliced
from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.numbers import MOST_DEVICES
from partool.spec.training import Precision
from partool.spec.watched import note_read

_PATH = ("hardware", "accelerator")
_OWN = ("memory_gib", "peak_tflops", "memory_gb_per_s")


@dataclass(frozen=True, slots=True)
class ResolvedHardware:
    """A resolved ``hardware`` section. ``devices`` is None exactly if there is an error among the diagnostics."""

    devices: Devices | None
    diagnostics: tuple[Diagnostic, ...]
    local: bool
    """True if the section describes the machine that runs this process."""


def resolve_hardware(spec: HardwareSpec, precision: Precision, max_devices: int | None = None) -> ResolvedHardware:
    """Return the machines with every figure decided, and findings; at most ``max_devices`` devices are used."""
    name = this_machine().accelerator if spec.accelerator == "auto" else spec.accelerator
    local = spec.accelerator in ("auto", "cpu")
    if name == "cpu":
        local = local and spec.nodes == 1
        findings = [*check_slice(spec, name, None), *_precision(CPU_SPEED, name, precision), *_power(spec, name, None)]
        if findings:
            return ResolvedHardware(None, tuple(findings), local)
        return _checked(spec, cpu(spec, precision, max_devices), max_devices, local)
    entry = table("accelerators").get(name)
    if entry is None:
        if any(getattr(spec, field) is None for field in _OWN):
            names = [*table("accelerators"), "cpu", "auto"]
            here = catalog_name(name)
            near = did_you_mean(name, names) if here == name else f"in the catalog this device is {here}."
            help_text = f"{near} Or write {', '.join(_OWN)} for a device of your own."
            finding = Diagnostic("PT260", f"the catalog has no accelerator {name!r}", path=_PATH, help=help_text)
            return ResolvedHardware(None, (finding,), local)
        entry = own_entry(spec)
    findings = check_slice(spec, name, entry)
    if any(finding.severity == "error" for finding in findings):
        return ResolvedHardware(None, tuple(findings), local)
    entry = sliced(entry, spec.slice) if spec.slice is not None else entry
    findings += [*_precision(entry["peak_tflops"], name, precision), *_power(spec, name, entry.get("power_w"))]
    fabric_name = spec.fabric or entry["fabric"]
    if fabric_name not in table("fabrics"):
        help_text = did_you_mean(fabric_name, table("fabrics"))
        text = f"the catalog has no fabric {fabric_name!r}"
        findings.append(Diagnostic("PT261", text, path=("hardware", "fabric"), help=help_text))
    if any(finding.severity == "error" for finding in findings):
        return ResolvedHardware(None, tuple(findings), local)
    note_read(("training", "precision"))  # findings above say that they are about it
    devices = accelerator(spec, name, entry, fabric_name, precision)
    if max_devices is not None and max_devices < devices.per_node:
        part = part_of(spec, entry, max_devices, devices.per_node)
        devices = accelerator(part, name, entry, fabric_name, precision)
    checked = _checked(spec, devices, max_devices, local)
    return replace(checked, diagnostics=(*findings, *checked.diagnostics))


def _checked(spec: HardwareSpec, devices: Devices, max_devices: int | None, local: bool) -> ResolvedHardware:
    findings = _contradictions(spec, devices)
    used = _limited(devices, max_devices)
    if used.nodes * used.per_node > MOST_DEVICES:
        text = f"nodes: {used.nodes:,} of per_node: {used.per_node:,} devices are more than {MOST_DEVICES:,}"
        help_text = f"write nodes: {MOST_DEVICES // used.per_node} or fewer, or limits.max_devices"
        findings.append(Diagnostic("PT275", text, path=("hardware", "nodes"), help=help_text))
    return ResolvedHardware(None if findings else used, tuple(findings), local)


def _precision(supported: Iterable[str], name: str, precision: Precision) -> list[Diagnostic]:
    if precision in supported:
        return []
    text = f"{name} has no {precision} arithmetic"
    nearest = next(kind for kind in ("bf16", "fp16", "fp32") if kind in supported)
    help_text = f"it has {', '.join(sorted(supported))}: write precision: {nearest}"
    return [Diagnostic("PT263", text, path=("training", "precision"), help=help_text)]


def _power(spec: HardwareSpec, name: str, usual_w: float | None) -> list[Diagnostic]:
    """Return a finding if the power limit exceeds the device's power, or if the device's power is not known."""
    limit_w = spec.power_w
    if limit_w is None or (usual_w is not None and limit_w <= usual_w):
        return []
    if usual_w is None:
        text = f"power_w lowers the catalog's throughput, and the catalog has no power of {name}"
        help_text = "leave power_w out, and write achievable_tflops as measured"
    else:
        text = f"power_w: {limit_w:g} is more than the {usual_w:g} W of {name}"
        help_text = f"write at most {usual_w:g}, or leave power_w out"
    return [Diagnostic("PT262", text, path=("hardware", "power_w"), help=help_text)]


def _contradictions(spec: HardwareSpec, devices: Devices) -> list[Diagnostic]:
    """Return findings about figures in the spec that contradict each other."""
    pairs: list[tuple[str, float | None, str, float | None, str]] = [
        ("achievable_tflops", devices.achievable_flops, "peak", devices.peak_flops, "peak_tflops"),
        ("attention_tflops", devices.attention_flops, "peak", devices.peak_flops, "peak_tflops"),
        ("wide_tflops", devices.wide_flops, "peak", devices.peak_flops, "peak_tflops"),
        ("pair_gb_per_s", devices.pair_bytes_per_s, "link", devices.link_bytes_per_s, "link_gb_per_s"),
    ]
    findings = []
    for field, value, what, limit, other in pairs:
        given: Any = getattr(spec, field)
        if given is None or value is None or limit is None or value <= limit * (1 + 1e-9):
            continue
        largest = limit / (1e12 if what == "peak" else 1e9)
        text = f"{field}: {given:g} is more than the device's {what}, {largest:g}"
        help_text = f"write at most {largest:g}, or a larger {other}"
        findings.append(Diagnostic("PT262", text, path=("hardware", field), help=help_text))
    if spec.backend is not None and spec.backend != devices.backend:
        text = f"{devices.accelerator} runs on {devices.backend}, not on {spec.backend}"
        help_text = "leave backend out; it is for devices that the catalog lacks"
        findings.append(Diagnostic("PT262", text, path=("hardware", "backend"), help=help_text))
    return findings


def _limited(devices: Devices, max_devices: int | None) -> Devices:
    """Return ``devices`` with as many whole nodes as ``max_devices`` allows, at least one."""
    if max_devices is None or devices.nodes * devices.per_node <= max_devices:
        return devices
    return devices.model_copy(update={"nodes": max_devices // devices.per_node})

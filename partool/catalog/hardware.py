"""From the ``hardware`` section to :class:`Devices`: catalog figures, this machine's, or the spec's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partool.catalog.lookup import did_you_mean, table
from partool.catalog.machine import cpu_gflops_per_core, this_machine
from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.training import Precision

_GIB = 2**30
_PATH = ("hardware", "accelerator")
_CPU_BYTES_PER_S_PER_CORE = 8e9  # copies and element-wise torch operators on one core of a 2.3 GHz Xeon: 8 to 10 GB/s
_CPU_LINK_GB_PER_S = 1.0  # gloo over the loopback device: gathers of 1.6 to 6.4 MB between two ranks, 0.5 to 1.2 GB/s
_CPU_SPEED = {"fp32": 1.0, "fp64": 0.5, "bf16": 0.5, "fp16": 0.1}  # against fp32, without matrix extensions
_OWN = ("memory_gib", "peak_tflops", "memory_gb_per_s")


@dataclass(frozen=True, slots=True)
class ResolvedHardware:
    """What became of a ``hardware`` section. ``devices`` is None exactly if there is an error among the diagnostics."""

    devices: Devices | None
    diagnostics: tuple[Diagnostic, ...]
    local: bool
    """True if the section means this machine."""


def resolve_hardware(spec: HardwareSpec, precision: Precision, max_devices: int | None = None) -> ResolvedHardware:
    """Decide every figure of the machines; at most ``max_devices`` devices are used."""
    name = this_machine().accelerator if spec.accelerator == "auto" else spec.accelerator
    local = spec.accelerator in ("auto", "cpu")
    if name == "cpu":
        return ResolvedHardware(
            _limited(_cpu(spec, precision, max_devices), max_devices), (), local and spec.nodes == 1
        )
    entry = table("accelerators").get(name)
    if entry is None:
        if any(getattr(spec, field) is None for field in _OWN):
            known = [*table("accelerators"), "cpu", "auto"]
            help_text = f"{did_you_mean(name, known)} Or write {', '.join(_OWN)} for a device of your own."
            finding = Diagnostic("PT260", f"the catalog has no accelerator {name!r}", path=_PATH, help=help_text)
            return ResolvedHardware(None, (finding,), local)
        entry = _own_entry(spec)
    found = _precision(entry, name, precision)
    fabric_name = spec.fabric or entry["fabric"]
    if fabric_name not in table("fabrics"):
        help_text = did_you_mean(fabric_name, table("fabrics"))
        text = f"the catalog has no fabric {fabric_name!r}"
        found.append(Diagnostic("PT261", text, path=("hardware", "fabric"), help=help_text))
    if found:
        return ResolvedHardware(None, tuple(found), local)
    return ResolvedHardware(_limited(_accelerator(spec, name, entry, fabric_name, precision), max_devices), (), local)


def _precision(entry: dict[str, Any], name: str, precision: Precision) -> list[Diagnostic]:
    peaks = entry["peak_tflops"]
    if precision in peaks:
        return []
    text = f"{name} has no {precision} arithmetic"
    help_text = f"it has {', '.join(sorted(peaks))}: write precision: fp16"
    return [Diagnostic("PT263", text, path=("training", "precision"), help=help_text)]


def _own_entry(spec: HardwareSpec) -> dict[str, Any]:
    peak = spec.peak_tflops or 0.0
    return {
        "backend": "cuda", "usable_gib": spec.memory_gib, "memory_gb_per_s": spec.memory_gb_per_s,
        "peak_tflops": dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), peak),
        "achievable_tflops": dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 0.75 * peak),
        "link_gb_per_s": 31.0, "per_node": 1, "fabric": "ethernet-100g", "host_memory_gib": None,
    }  # fmt: skip


def _accelerator(
    spec: HardwareSpec, name: str, entry: dict[str, Any], fabric_name: str, precision: Precision
) -> Devices:
    per_node = entry["per_node"] if spec.per_node == "auto" else spec.per_node
    if spec.accelerator == "auto" and spec.per_node == "auto":
        per_node = max(1, this_machine().devices)
    peak = entry["peak_tflops"][precision] * 1e12
    achievable = entry["achievable_tflops"][precision] * 1e12
    if spec.peak_tflops is not None:
        achievable *= spec.peak_tflops * 1e12 / peak
        peak = spec.peak_tflops * 1e12
    host = spec.host_memory_gib or entry["host_memory_gib"]
    return Devices(
        accelerator=name,
        backend=entry["backend"],
        nodes=spec.nodes,
        per_node=per_node,
        memory_bytes=int((spec.memory_gib or entry["usable_gib"]) * _GIB),
        peak_flops=peak,
        achievable_flops=achievable,
        memory_bytes_per_s=(spec.memory_gb_per_s or entry["memory_gb_per_s"]) * 1e9,
        link_bytes_per_s=(spec.link_gb_per_s or entry["link_gb_per_s"]) * 1e9,
        fabric_bytes_per_s=_fabric(spec, fabric_name, per_node),
        host_memory_bytes=int(host * _GIB) if host else None,
    )


def _fabric(spec: HardwareSpec, name: str, per_node: int) -> float:
    if spec.fabric_gb_per_s is not None:
        return spec.fabric_gb_per_s * 1e9
    entry = table("fabrics")[name]
    shared_by = per_node if entry["per"] == "node" else 1
    return float(entry["gb_per_s"]) * 1e9 / shared_by


def _cpu(spec: HardwareSpec, precision: Precision, max_devices: int | None) -> Devices:
    """Price ranks on a CPU, which share its memory and cores; ``auto`` is two ranks, one where there is one core."""
    machine = this_machine()
    per_node = min(2, machine.cores) if spec.per_node == "auto" else spec.per_node
    per_node = min(per_node, max_devices or per_node)
    threads = max(1, machine.cores // per_node)
    cores = min(float(threads), machine.cores / per_node)
    host = int((spec.memory_gib or spec.host_memory_gib or 0.0) * _GIB) or machine.memory_bytes
    achievable = cores * cpu_gflops_per_core() * 1e9 * _CPU_SPEED[precision]
    if spec.peak_tflops is not None:
        achievable = 0.75 * spec.peak_tflops * 1e12
    memory = spec.memory_gb_per_s * 1e9 / per_node if spec.memory_gb_per_s else cores * _CPU_BYTES_PER_S_PER_CORE
    fabric = spec.fabric if spec.fabric in table("fabrics") else "ethernet-25g"
    return Devices(
        accelerator="cpu",
        backend="cpu",
        nodes=spec.nodes,
        per_node=per_node,
        memory_bytes=host // per_node,
        peak_flops=spec.peak_tflops * 1e12 if spec.peak_tflops else None,
        achievable_flops=achievable,
        memory_bytes_per_s=memory,
        link_bytes_per_s=(spec.link_gb_per_s or _CPU_LINK_GB_PER_S) * 1e9,
        fabric_bytes_per_s=_fabric(spec, fabric or "ethernet-25g", per_node),
        host_memory_bytes=host,
        threads_per_rank=threads,
    )


def _limited(devices: Devices, max_devices: int | None) -> Devices:
    """Use whole nodes up to ``max_devices``, or part of one node."""
    if max_devices is None or devices.nodes * devices.per_node <= max_devices:
        return devices
    if max_devices < devices.per_node:
        return devices.model_copy(update={"nodes": 1, "per_node": max_devices})
    return devices.model_copy(update={"nodes": max_devices // devices.per_node})

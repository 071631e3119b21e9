"""Computes the performance figures of machines from the catalog; those of unknown devices come from the spec."""

from __future__ import annotations

from typing import Any

from partool.catalog.lookup import table
from partool.catalog.machine import cpu_gflops_per_core, this_machine
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.training import Precision

_GIB = 2**30
_CPU_BYTES_PER_S_PER_CORE = 8e9  # copies and element-wise torch operators on one core of a 2.3 GHz Xeon: 8 to 10 GB/s
_CPU_LINK_GB_PER_S = 1.0  # gloo over the loopback device: gathers of 1.6 to 6.4 MB between two ranks, 0.5 to 1.2 GB/s
_CPU_LATENCY_S = 300e-6  # start of a gloo collective between ranks that share cores
_CPU_OPERATOR_S = 8e-6  # start of one torch operator
CPU_SPEED = {"fp32": 1.0, "fp64": 0.5, "bf16": 0.5, "fp16": 0.1}
"""Precision → a CPU's speed in it divided by the speed in fp32, without matrix extensions; fp8 is missing."""
_ACHIEVABLE = 0.75
"""Assumed ratio of achievable to peak throughput of a device that only the spec describes."""
_POWER = 2 / 3
"""Exponent of throughput against a power limit: dynamic power grows with the cube of the clock where voltage follows
it, and part of the power is static."""
_PLAIN = {
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "achievable_tflops": ("achievable_flops", 1e12),
    "attention_tflops": ("attention_flops", 1e12),
    "link_gb_per_s": ("link_bytes_per_s", 1e9),
    "pair_gb_per_s": ("pair_bytes_per_s", 1e9),
    "link_latency_us": ("link_latency_s", 1e-6),
    "fabric_gb_per_s": ("fabric_bytes_per_s", 1e9),
    "fabric_latency_us": ("fabric_latency_s", 1e-6),
    "host_link_gb_per_s": ("host_link_bytes_per_s", 1e9),
    "host_memory_gb_per_s": ("host_memory_bytes_per_s", 1e9),
    "nvme_gb_per_s": ("disk_bytes_per_s", 1e9),
    "storage_gb_per_s": ("storage_bytes_per_s", 1e9),
    "operator_us": ("operator_s", 1e-6),
    "sustained_share": ("sustained_share", None),
    "topology": ("topology", None),
    "architecture": ("architecture", None),
    "domain": ("domain", None),
    "units": ("units", None),
    "host_cores": ("host_cores", None),
}
"""Field of ``hardware`` in the spec → (field of :class:`Devices` to replace, factor from the spec's unit or None)."""


def own_entry(spec: HardwareSpec) -> dict[str, Any]:
    """Return a catalog-like entry for a device that the catalog lacks.

    The device is assumed to be a card in a PCIe 4 slot, without links to other cards.
    """
    peaks = dict.fromkeys(("fp64", "fp32", "bf16", "fp16", "fp8"), spec.peak_tflops or 0.0)
    return {
        "backend": spec.backend or "cuda", "usable_gib": spec.memory_gib, "memory_gb_per_s": spec.memory_gb_per_s,
        "peak_tflops": peaks, "achievable_tflops": {name: _ACHIEVABLE * peak for name, peak in peaks.items()},
        "attention_share": {}, "units": 0, "topology": "none", "link_gb_per_s": 31.0, "pair_gb_per_s": None,
        "link_latency_us": 14.0, "domain": None, "host_link_gb_per_s": 31.0, "host": "epyc-rome-1s",
        "devices_per_host": 0, "host_memory_gib": None, "per_node": 1, "fabric": "ethernet-100g",
        "kernel_limits": {"architecture": ""},
    }  # fmt: skip


def accelerator(
    spec: HardwareSpec, name: str, entry: dict[str, Any], fabric_name: str, precision: Precision
) -> Devices:
    """Return the machines with accelerators that ``entry`` of the catalog describes, with figures for ``precision``."""
    per_node = entry["per_node"] if spec.per_node == "auto" else spec.per_node
    if spec.accelerator == "auto" and spec.per_node == "auto" and spec.slice is None:
        per_node = max(1, this_machine().devices)
    fabric, host = table("fabrics")[fabric_name], table("hosts")[entry["host"]]
    hosts = _hosts(entry, per_node)
    memory_gib = spec.host_memory_gib or (entry["host_memory_gib"] or 0) * hosts
    memory_gib *= _reachable(entry, per_node)
    devices = Devices(
        accelerator=name,
        architecture=entry["kernel_limits"]["architecture"],
        measured_as="" if spec.slice else entry.get("measured_as", ""),
        slice=spec.slice or "",
        backend=entry["backend"],
        nodes=spec.nodes,
        per_node=per_node,
        domain=_domain(entry, per_node),
        memory_bytes=int((spec.memory_gib or entry["usable_gib"]) * _GIB),
        **_compute(spec, entry, precision),
        sustained_share=entry.get("sustained_share", 1.0),
        units=entry["units"],
        memory_bytes_per_s=entry["memory_gb_per_s"] * 1e9,
        topology=entry["topology"],
        link_bytes_per_s=entry["link_gb_per_s"] * 1e9,
        pair_bytes_per_s=entry["pair_gb_per_s"] * 1e9 if entry["pair_gb_per_s"] else None,
        link_latency_s=entry["link_latency_us"] * 1e-6,
        fabric=fabric_name,
        fabric_bytes_per_s=_fabric(fabric, per_node) * entry.get("fabric_share", 1.0),
        fabric_latency_s=fabric["latency_us"] * 1e-6,
        host_link_bytes_per_s=entry["host_link_gb_per_s"] * 1e9,
        host_memory_bytes=int(memory_gib * _GIB) or None,
        host_memory_bytes_per_s=host["memory_gb_per_s"] * 1e9 * hosts * entry.get("host_share", 1.0),
        host_cores=max(1, int(host["cores"] * hosts * entry.get("host_share", 1.0))),
        operator_s=host["operator_us"] * 1e-6,
    )
    return _replaced(spec, devices, precision)


def cpu(spec: HardwareSpec, precision: Precision, max_devices: int | None) -> Devices:
    """Return the machines for training on CPUs; the ranks of a machine share its memory and cores.

    ``per_node: auto`` means two ranks, or one rank on a machine with one core.
    """
    machine = this_machine()
    per_node = min(2, machine.cores) if spec.per_node == "auto" else spec.per_node
    per_node = min(per_node, max_devices or per_node)
    threads = max(1, machine.cores // per_node)
    cores = min(float(threads), machine.cores / per_node)
    host = int((spec.memory_gib or spec.host_memory_gib or 0.0) * _GIB) or machine.memory_bytes
    achievable = cores * cpu_gflops_per_core() * 1e9 * CPU_SPEED[precision]
    if spec.peak_tflops is not None:
        achievable = _ACHIEVABLE * spec.peak_tflops * 1e12
    fabric_name = spec.fabric if spec.fabric in table("fabrics") else "ethernet-25g"
    devices = Devices(
        accelerator="cpu",
        backend="cpu",
        nodes=spec.nodes,
        per_node=per_node,
        memory_bytes=host // per_node,
        peak_flops=spec.peak_tflops * 1e12 if spec.peak_tflops else None,
        achievable_flops=achievable,
        memory_bytes_per_s=cores * _CPU_BYTES_PER_S_PER_CORE,
        link_bytes_per_s=_CPU_LINK_GB_PER_S * 1e9,
        link_latency_s=_CPU_LATENCY_S,
        operator_s=_CPU_OPERATOR_S,
        fabric=fabric_name,
        fabric_bytes_per_s=_fabric(table("fabrics")[fabric_name], per_node),
        host_memory_bytes=host,
        threads_per_rank=threads,
    )
    devices = _replaced(spec, devices, precision)
    if spec.memory_gb_per_s is None:
        return devices
    return devices.model_copy(update={"memory_bytes_per_s": spec.memory_gb_per_s * 1e9 / per_node})


def _compute(spec: HardwareSpec, entry: dict[str, Any], precision: Precision) -> dict[str, Any]:
    """Return the device's peak, matrix-product and attention FLOP/s in ``precision``, by field of :class:`Devices`.

    If the spec gives a peak, all these rates are scaled with it; a power limit lowers all of them except the peak.
    """
    peaks, achievable = entry["peak_tflops"], entry["achievable_tflops"]
    scale = spec.peak_tflops / peaks[precision] if spec.peak_tflops is not None else 1.0
    sustained = scale * min((spec.power_w / entry["power_w"]) ** _POWER if spec.power_w else 1.0, 1.0)
    wide = "bf16" if precision == "fp8" else precision
    share = max(entry["attention_share"].values(), default=None)
    return {
        "peak_flops": peaks[precision] * 1e12 * scale,
        "achievable_flops": achievable[precision] * 1e12 * sustained,
        "wide_flops": achievable[wide] * 1e12 * sustained if precision == "fp8" else None,
        "attention_flops": share * peaks[wide] * 1e12 * sustained if share else None,
    }


def _replaced(spec: HardwareSpec, devices: Devices, precision: Precision) -> Devices:
    """Return ``devices`` with every figure that the spec gives; other figures stay as in the catalog."""
    update: dict[str, Any] = {}
    for field, (name, unit) in _PLAIN.items():
        value = getattr(spec, field)
        if value is not None:
            update[name] = value * unit if unit else value
    if spec.wide_tflops is not None and precision == "fp8":
        update["wide_flops"] = spec.wide_tflops * 1e12
    pair, link = devices.pair_bytes_per_s, update.get("link_bytes_per_s")
    if spec.pair_gb_per_s is None and pair and link and link < pair:
        update["pair_bytes_per_s"] = link
    return devices.model_copy(update=update)


def _hosts(entry: dict[str, Any], devices: int) -> int:
    """Return the number of separate host memories that ``devices`` devices use: one per Superchip, else one."""
    return -(-devices // entry["devices_per_host"]) if entry["devices_per_host"] else 1


def _reachable(entry: dict[str, Any], per_node: int) -> float:
    """Return the share of a node's host memory that its ranks can use in equal parts.

    On Superchips each rank uses the memory of its chip; if a node's chips have different numbers of devices in use
    (three of GB200's four), ranks of the fuller chip cannot use the other chip's memory.
    """
    each: int = entry["devices_per_host"]
    return per_node / (min(per_node, each) * _hosts(entry, per_node)) if each else 1.0


def part_of(spec: HardwareSpec, entry: dict[str, Any], devices: int, total_devices: int) -> HardwareSpec:
    """Return ``spec`` for one node on which only ``devices`` of its ``total_devices`` devices are used.

    On Superchips, host memory and cores are reduced to those of the Superchips in use.
    """
    update: dict[str, Any] = {"nodes": 1, "per_node": devices}
    if entry["devices_per_host"]:
        share = _hosts(entry, devices) / _hosts(entry, total_devices)
        for field in ("host_memory_gib", "host_memory_gb_per_s"):
            value = getattr(spec, field)
            update |= {field: value * share} if value is not None else {}
        if spec.host_cores is not None:
            update["host_cores"] = max(1, int(spec.host_cores * share))
    return spec.model_copy(update=update)


def _domain(entry: dict[str, Any], per_node: int) -> int:
    """Return the number of devices that a rack's fast link joins; 0 if the machines have no such link."""
    if not entry["domain"]:
        return 0
    rack: int = entry["domain"]
    return min(rack, rack // int(entry["per_node"]) * per_node)


def fabric_figures(name: str, per_node: int) -> dict[str, Any]:
    """Return fields of :class:`Devices` for a fabric of the catalog, on nodes of ``per_node`` devices."""
    entry = table("fabrics")[name]
    figures = {"fabric_bytes_per_s": _fabric(entry, per_node), "fabric_latency_s": entry["latency_us"] * 1e-6}
    return {"fabric": name, **figures}


def _fabric(entry: dict[str, Any], per_node: int) -> float:
    """Return the bytes per second from one device to other nodes; the devices of a node may share network adapters."""
    return float(entry["gb_per_s"]) * 1e9 / (per_node if entry["per"] == "node" else 1)

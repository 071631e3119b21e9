"""Slices of an accelerator: NVIDIA's Multi-Instance GPU (MIG), of which each instance is a device of its own.

Source: NVIDIA Multi-Instance GPU User Guide, https://docs.nvidia.com/datacenter/tesla/mig-user-guide.
"""

from __future__ import annotations

from typing import Any

from partool.catalog.lookup import table
from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import HardwareSpec

_PATH = ("hardware", "slice")


def sliced(entry: dict[str, Any], profile: str) -> dict[str, Any]:
    """Return a catalog-like entry for one slice of the device that ``entry`` of the catalog describes.

    Products and attention are scaled with the multiprocessors, memory and its bandwidth as NVIDIA's tables say. The
    host, its link and the network are shared by the slices that fit on a node, each of which gets an equal part.
    """
    slices = entry["slices"]
    compute, most = slices["units"][profile] / entry["units"], slices["most"][profile]
    part = 1.0 / (most * entry["per_node"])
    return {
        **entry,
        "usable_gib": slices["usable_gib"][profile],
        "units": slices["units"][profile],
        "memory_gb_per_s": entry["memory_gb_per_s"] * slices["memory_share"][profile],
        "peak_tflops": {name: rate * compute for name, rate in entry["peak_tflops"].items()},
        "achievable_tflops": {name: rate * compute for name, rate in entry["achievable_tflops"].items()},
        "topology": "none",
        "link_gb_per_s": entry["host_link_gb_per_s"] / most,
        "pair_gb_per_s": None,
        "domain": None,
        "host_link_gb_per_s": entry["host_link_gb_per_s"] / most,
        "host_memory_gib": entry["host_memory_gib"] * part,
        "host_share": part,
        "fabric_share": 1.0 / most,
        "per_node": 1,
    }


def check_slice(spec: HardwareSpec, name: str, entry: dict[str, Any] | None) -> list[Diagnostic]:
    """Return findings about ``hardware.slice``: an unknown profile, or slices that would have to train together."""
    if spec.slice is None:
        return []
    profiles = list(entry["slices"]["units"]) if entry is not None and "slices" in entry else []
    if not profiles:
        have = ", ".join(each for each, other in table("accelerators").items() if "slices" in other)
        return [Diagnostic("PT277", f"{name} has no MIG slices in the catalog", path=_PATH, help=f"they have: {have}")]
    if spec.slice not in profiles:
        text = f"{name} has no MIG slice {spec.slice!r}"
        return [Diagnostic("PT277", text, path=_PATH, help=f"its slices: {', '.join(profiles)}")]
    if spec.per_node not in ("auto", 1):
        text = f"per_node: {spec.per_node} slices of a node cannot train one model: a process sees only one slice"
        help = "write per_node: 1, or leave slice out and use whole devices"
        return [Diagnostic("PT278", text, path=("hardware", "per_node"), help=help)]
    if spec.nodes > 1:
        text = f"{spec.nodes} slices train over the network only, and NCCL's support of MIG is experimental"
        help = "use NCCL 2.32 or newer; MIG has no NVLink and no peer access, so that whole devices are much faster"
        return [Diagnostic("PT278", text, "warning", ("hardware", "nodes"), help=help)]
    return []

"""Machines of rows: catalog entries, with the figures that a row prints in their place."""

from __future__ import annotations

import re
from functools import cache
from math import prod
from typing import Any

from partool.catalog.hardware import resolve_hardware
from partool.catalog.lookup import table
from partool.replay.cells import Cells
from partool.replay.networks import network_of
from partool.spec.hardware import Devices, HardwareSpec

_NAMES = (
    (r"gb300", "gb300"), (r"b300", "b300"), (r"gb200", "gb200"), (r"b200|blackwell", "b200"),
    (r"gh200.*144", "gh200-144"),
    (r"gh200|grace.?hopper", "gh200-96"), (r"h200", "h200"), (r"h100.*nvl", "h100-nvl"), (r"h100.*pcie", "h100-pcie"),
    (r"h100|h800", "h100-sxm"), (r"\bh20\b", "h20"), (r"a100.*40", "a100-40"), (r"a100|a800", "a100-80"),
    (r"a10g?\b", "a10g"),
    (r"a6000", "rtx-a6000"), (r"4090", "rtx-4090"), (r"l40", "l40s"), (r"v100.*16", "v100-16"), (r"v100", "v100-32"),
    (r"mi355x?", "mi355x"), (r"mi350x?", "mi355x"), (r"mi325x?", "mi325x"), (r"mi300", "mi300x"),
    (r"mi250", "mi250x"), (r"\bt4\b", "t4"),
)  # fmt: skip
_BY_MEMORY = ((23, 26, "rtx-4090"), (38, 42, "a100-40"), (46, 50, "l40s"), (78, 82, "a100-80"))


def accelerator_of(cells: Cells) -> str | None:
    """Return the catalog name of a row's device, or None."""
    text = cells.lower("gpu")
    if text in table("accelerators"):
        return text
    for pattern, name in _NAMES:
        if re.search(pattern, text):
            return name if name in table("accelerators") else None
    size = cells.number("gpu")
    if size is not None and "gb" in text:
        return next((name for low, high, name in _BY_MEMORY if low <= size <= high), None)
    return None


def precision_of(cells: Cells, accelerator: str) -> str | None:
    """Return the precision of a row in the spec's terms, or None where specs cannot express it."""
    text = cells.lower("dtype")
    peaks = table("accelerators")[accelerator]["peak_tflops"]
    if "fp4" in text or "int4" in text or "nf4" in text or "int8" in text:
        return None
    if "fp8" in text or "float8" in text or re.search(r"\bf8\b", text):
        return "fp8" if "fp8" in peaks else None
    if re.search(r"fp16|float16|half", text) and "bf" not in text:
        return "fp16"
    if re.search(r"fp32|float32|tf32", text) and "bf16" not in text:
        return "fp32"
    return "bf16" if "bf16" in peaks else "fp16"


def ranks_of(cells: Cells) -> int:
    """Return the devices of a row: as printed, else the product of its degrees."""
    return cells.count("n_gpus") or min(prod(cells.count(name, 1) for name in ("dp", "tp", "pp", "cp")), 10**7)


def devices_of(cells: Cells, accelerator: str, precision: str) -> Devices | None:
    """Return the machines of a row, or None where the numbers of devices make no sense."""
    ranks = ranks_of(cells)
    usual = table("accelerators")[accelerator]["per_node"]
    per_node = min(cells.count("gpus_per_node", usual), ranks, 1024)
    base = _resolved(accelerator, max(-(-ranks // per_node), 1), per_node, precision, _power_w(cells, accelerator))
    return None if base is None else base.model_copy(update=_figures(cells, base, per_node))


@cache
def _resolved(accelerator: str, nodes: int, per_node: int, precision: str, power_w: float | None) -> Devices | None:
    if nodes > 100_000:
        return None
    spec = HardwareSpec(accelerator=accelerator, nodes=nodes, per_node=per_node, power_w=power_w)
    return resolve_hardware(spec, precision).devices  # type: ignore[arg-type]


def _figures(cells: Cells, base: Devices, per_node: int) -> dict[str, Any]:
    """Return what a row says otherwise: memory, its bandwidth, and the network's rate."""
    text = cells.lower("gpu")
    figures: dict[str, Any] = {}
    if size := re.search(r"(\d+(?:\.\d+)?)\s*gi?b\b", text):
        gib = float(size.group(1))
        if not 0.9 < gib * 2**30 / base.memory_bytes < 1.08:
            figures["memory_bytes"] = int(gib * (1.0 if "gib" in text else 0.985) * 2**30)
    if rate := re.search(r"(\d+(?:\.\d+)?)\s*tb/s", text):
        figures["memory_bytes_per_s"] = float(rate.group(1)) * 1e12
    if network := network_of(cells.text("inter_bw_note"), per_node, base.fabric_bytes_per_s):
        figures["fabric_bytes_per_s"] = network.bytes_per_s
    return figures


def _power_w(cells: Cells, accelerator: str) -> float | None:
    """Return the power limit that a row states, if it is below the catalog's."""
    power, usual = re.search(r"(\d{3,4})\s*w\b", cells.lower("gpu")), table("accelerators")[accelerator].get("power_w")
    return float(power.group(1)) if power and usual and float(power.group(1)) < usual else None

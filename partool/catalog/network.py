"""Environment variables for NCCL, RCCL and libfabric on each kind of network, read from network_env.json.

Each variable has a reason and the page that it comes from. Few are set: the libraries choose well by themselves, and a
wrong variable is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partool.catalog.lookup import table
from partool.spec.hardware import Devices
from partool.spec.launch import NetworkPreset


@dataclass(frozen=True, slots=True)
class NetworkVariable:
    """An environment variable that a network preset sets."""

    name: str
    value: str
    why: str
    preset: str
    source: str
    """URL of the page that recommends the variable."""
    as_of: str
    """Year and month in which the page was read."""


def preset_of(fabric: str) -> str:
    """Return the preset for a fabric of the catalog (``ib-ndr`` → ``ib``); empty if there is none."""
    for prefix, preset in _data()["fabrics"].items():
        if fabric.startswith(prefix):
            return str(preset)
    return ""


def is_rdma(fabric: str) -> bool:
    """Return True if a fabric of the catalog is reached through adapters of its own, which containers have to be given.

    Ethernet without RDMA is reached through sockets.
    """
    return preset_of(fabric) not in ("", "tcp")


def network_environment(preset: NetworkPreset, devices: Devices) -> tuple[NetworkVariable, ...]:
    """Return the variables that ``preset`` sets for ranks on ``devices``, sorted by name; none on a single node.

    The preset ``auto`` means the preset of the machines' fabric. Ranks on a CPU get no variables: they communicate
    through gloo, which reads none of them.
    """
    name = preset_of(devices.fabric) if preset == "auto" else preset
    if devices.nodes == 1 or devices.backend == "cpu" or name not in _data()["presets"]:
        return ()
    sources = _data()["sources"]
    variables = [
        NetworkVariable(
            row["name"],
            row["value"],
            row["why"],
            name,
            sources[row["source"]]["url"],
            sources[row["source"]]["as_of"],
        )
        for row in _data()["presets"][name]
        if _applies(row, devices)
    ]
    return tuple(sorted(variables, key=lambda variable: variable.name))


def _applies(row: dict[str, Any], devices: Devices) -> bool:
    backends, accelerators = row.get("backends"), row.get("accelerators")
    if backends is not None and devices.backend not in backends:
        return False
    return accelerators is None or devices.accelerator.startswith(tuple(accelerators))


def _data() -> dict[str, dict[str, Any]]:
    return table("network_env")

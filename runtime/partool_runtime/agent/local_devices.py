"""Finds the accelerators that the ranks of this node will use, in rank order, and each accelerator's nearest NUMA node.

Devices and nodes are read from sysfs and procfs: the vendor's libraries would create a context on every device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

NO_NODE = -1
"""The kernel's value for a device whose NUMA node is unknown."""
_NVIDIA = ("0x10de", ("0x0300", "0x0302"))
_AMD = ("0x1002", ("0x0302", "0x0380", "0x1200"))
"""PCI vendor id, and PCI class ids of VGA, 3D and display controllers and of accelerators
(https://pci-ids.ucw.cz/read/PD).
"""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator."""

    bus: str
    """Domain, bus, device and function, in sysfs's format."""
    node: int
    """NUMA node nearest to the device; :data:`NO_NODE` where the firmware gives none."""
    model: str = ""
    """PCI device id."""
    uuid: str = ""
    """UUID as in device masks, in lower case; empty where unknown."""
    index: int = 0
    """Position by bus id among all devices of its kind in this node, including devices not usable here."""
    count: int = 1
    """Number of devices of its kind in this node."""


class UnknownDevicesError(Exception):
    """The devices that the ranks will get cannot be determined; the text gives the reason."""


def local_devices(backend: str, environ: Mapping[str, str], root: Path) -> list[Device]:
    """Return the devices that rank 0, 1, ... of this node will use; raises UnknownDevicesError.

    ``root`` is the folder that holds ``sys``, ``proc`` and ``dev``.
    """
    if backend == "rocm":
        devices = _by_mask(_amd(root), environ, "ROCR_VISIBLE_DEVICES")
        # HIP prefers its mask to CUDA's (https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html)
        name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in environ else "CUDA_VISIBLE_DEVICES"
        return _by_mask(devices, environ, name)
    devices = _nvidia(root)
    if len({device.model for device in devices}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables: the fastest device is first
        raise UnknownDevicesError("this node's devices differ; CUDA_DEVICE_ORDER=PCI_BUS_ID would number them by place")
    return _by_mask(devices, environ, "CUDA_VISIBLE_DEVICES")


def _by_mask(devices: list[Device], environ: Mapping[str, str], name: str) -> list[Device]:
    """Return the devices that the mask in variable ``name`` lists, in the mask's order.

    An invalid entry ends the mask, as in the vendors' libraries.
    """
    if name not in environ:
        return devices
    chosen: list[Device] = []
    for entry in (part.strip().lower() for part in environ[name].split(",")):
        if re.fullmatch(r"[0-9]+", entry):
            if int(entry) >= len(devices):
                break
            chosen.append(devices[int(entry)])
        elif entry.startswith("gpu-"):
            matches = [device for device in devices if device.uuid and device.uuid.startswith(entry)]
            if len(matches) != 1:
                raise UnknownDevicesError(f"{name} names {entry}, which is not among the devices that can be seen here")
            chosen.append(matches[0])
        elif entry.startswith("mig-"):
            raise UnknownDevicesError(f"{name} names a part of a device ({entry})")
        else:
            break
    return chosen


def _nvidia(root: Path) -> list[Device]:
    """Return the NVIDIA devices that this process may open, sorted by bus id.

    A container, or a job with constrained devices, sees every device in sysfs but may open only some of them; the
    driver then numbers only the devices that may be opened.
    """
    devices = _pci(root, *_NVIDIA)
    descriptions = [_nvidia_information(root, device.bus) for device in devices]
    if all(descriptions):
        pairs = zip(devices, descriptions, strict=True)
        return [
            _named(device, info) for device, info in pairs if _may_open(root / f"dev/nvidia{info.get('device minor')}")
        ]
    if any(descriptions):  # NVIDIA's container library mounts only the folders of the container's devices
        return [_named(device, info) for device, info in zip(devices, descriptions, strict=True) if info]
    files = [file for file in (root / "dev").glob("nvidia[0-9]*") if _may_open(file)]
    if len(files) != len(devices):
        raise UnknownDevicesError(
            f"{len(devices)} devices are in this node, {len(files)} can be opened: which is unknown"
        )
    return devices


def _named(device: Device, information: dict[str, str]) -> Device:
    return replace(device, uuid=information.get("gpu uuid", "").lower())


def _nvidia_information(root: Path, bus: str) -> dict[str, str]:
    """Return the driver's information on a device, with keys in lower case; empty where the driver does not know it."""
    text = _text(root / "proc/driver/nvidia/gpus" / bus.lower() / "information")
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _amd(root: Path) -> list[Device]:
    """Return the AMD devices that this process may open, in the order of the driver's topology, else by bus id.

    The driver's topology also lists the partitions of a device, which share a bus address.
    """
    places = {device.bus: device for device in _pci(root, *_AMD)}
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*"), key=lambda path: int(path.name))
    opened: list[Device] = []
    for properties in map(_properties, nodes):
        if not properties.get("simd_count"):
            continue  # a CPU
        slot = _slot(properties.get("domain", 0), properties["location_id"])
        place = next((device for bus, device in places.items() if bus.rpartition(".")[0] == slot), None)
        minor = properties.get("drm_render_minor", 0)
        if place is not None and _may_open(root / f"dev/dri/renderD{minor}"):
            opened.append(place)
    return opened or [device for device in places.values() if _amd_opens(root, device)]


def _slot(domain: int, location: int) -> str:
    """Return domain, bus and device of the driver's location id; the id's last three bits are the partition."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"


def _amd_opens(root: Path, device: Device) -> bool:
    nodes = list((root / "sys/bus/pci/devices" / device.bus / "drm").glob("renderD*"))
    return any(_may_open(root / "dev/dri" / node.name) for node in nodes)


def _properties(node: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(node / "properties").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _pci(root: Path, vendor: str, classes: tuple[str, ...]) -> list[Device]:
    devices = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(folder / "vendor") != vendor or not _text(folder / "class").startswith(classes):
            continue
        node = _text(folder / "numa_node")
        unique = _text(folder / "unique_id").lower()  # of AMD's driver; masks write it as GPU-<16 digits>
        uuid = f"gpu-{unique}" if unique else ""
        devices.append(Device(folder.name, int(node) if node else NO_NODE, _text(folder / "device"), uuid))
    return [replace(device, index=index, count=len(devices)) for index, device in enumerate(devices)]


def _may_open(file: Path) -> bool:
    # access(2) also checks the control group's device rules, and opens nothing.
    return os.access(file, os.R_OK | os.W_OK)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

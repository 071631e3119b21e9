"""Detects this machine's accelerators, memory and cores without torch; limits of control groups are respected."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from partool.catalog.lookup import table

_GIB = 2**30
_GROUPS = Path("/sys/fs/cgroup")
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""Folder where AMD's kernel driver lists its devices."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices, cores and memory of this machine."""

    accelerator: str
    """Catalog name, ``cpu``, or the driver's name for a device that the catalog lacks."""
    devices: int
    cores: int
    memory_bytes: int
    """Host memory, at most the limit of this process's control group."""


@cache
def this_machine() -> Machine:
    """Return this machine with its NVIDIA devices, else with its AMD devices, else as a machine with only a CPU."""
    cores, memory = available_cores(), host_memory_bytes()
    names = _nvidia_names()
    if names:
        return Machine(catalog_name(names[0]), len(names), cores, memory)
    targets = _amd_targets()
    if targets:
        return Machine(_amd_name(*targets[0]), len(targets), cores, memory)
    return Machine("cpu", 0, cores, memory)


_DEVICE_FILES = {
    "cuda": ("nvidia[0-9]*", "dxg", "nvgpu", "nvhost-*"),  # of the driver, of Windows below Linux, of Jetson boards
    "rocm": ("kfd", "dxg"),
}
"""Device files of accelerators by backend, as patterns below :data:`DEVICE_FOLDER`."""
DEVICE_FOLDER = Path("/dev")


def missing_devices(backend: str, wanted: int) -> str:
    """Return why this machine cannot have ``wanted`` devices of a backend; empty if it has, or may have, them."""
    if backend not in _DEVICE_FILES:
        return ""
    machine = this_machine()
    if not any(next(DEVICE_FOLDER.glob(pattern), None) for pattern in _DEVICE_FILES[backend]):
        return "this machine has no accelerator" if machine.accelerator == "cpu" else f"it has {machine.accelerator}"
    if 0 < machine.devices < wanted:
        return f"this machine has {machine.devices}"
    return ""


def processor() -> str:
    """Return the processor's name from ``/proc/cpuinfo``; empty if it is not found."""
    lines = _read("/proc/cpuinfo").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def available_cores(groups: Path = _GROUPS) -> int:
    """Return the number of cores (at least 1) in this process's affinity mask, limited by the control group's quota.

    Containers see all cores of their host and get a quota (``limits.cpu`` of Kubernetes, ``--cpus`` of docker).
    ``groups`` is where control groups of version 2, or the folders of version 1's controllers, are mounted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    both = [_read(groups / "cpu.max").split()]
    both += [
        [_read(groups / name / file).strip() for file in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for name in ("cpu", "cpu,cpuacct")
    ]
    for quota in both:
        if len(quota) == 2 and all(part.isdigit() and int(part) for part in quota):  # no quota: "max", or -1
            cores = min(cores, int(quota[0]) // int(quota[1]))
    return max(1, cores)


def host_memory_bytes() -> int:
    """Return the bytes of the host's memory, or the control group's limit if the limit is lower."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total = int(lines["MemTotal"].split()[0]) * 1024 if "MemTotal" in lines else 4 * _GIB
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(path).strip()
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def cpu_gflops_per_core() -> float:
    """Return the assumed fp32 GFLOP/s of one core in matrix products, for the core's widest vector instructions.

    Source: ``torch.nn.functional.linear`` of 1024 to 4096 rows and widths of 192 to 2048 on one thread of a 2.3 GHz
    Xeon with AVX-512 gave 123 to 136 GFLOP/s on an idle machine, 62 to 78 with every core at work; 95 lies between.
    Figures for narrower vectors are proportional to the vectors' width.
    """
    flags = _read("/proc/cpuinfo")
    if "avx512f" in flags:
        return 95.0
    return 50.0 if "avx2" in flags else 25.0


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _nvidia_names() -> list[str]:
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names += [line.split(":", 1)[1].strip() for line in _read(str(file)).splitlines() if line.startswith("Model:")]
    return names or _nvidia_smi()


def _nvidia_smi() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in process.stdout.splitlines() if line.strip()]


def catalog_name(driver_name: str) -> str:
    """Return the name of the catalog entry for a device name from the driver, or that device name if there is no entry.

    Only whole words match, because GB200 contains B200.
    """
    for name, entry in table("accelerators").items():
        if any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", driver_name) for part in entry["match"]):
            return name
    return driver_name


def _amd_targets() -> list[tuple[int, int]]:
    """Return (architecture number, bytes of memory) of every AMD device, in the order of the kernel driver."""
    targets = []
    for file in sorted(_KFD.glob("*/properties")):
        values = _pairs(file)
        if int(values.get("simd_count", "0")) > 0:
            banks = file.parent.glob("mem_banks/*/properties")
            size = sum(int(_pairs(bank).get("size_in_bytes", "0")) for bank in banks)
            targets.append((int(values.get("gfx_target_version", "0")), size))
    return targets


def _pairs(file: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in _read(str(file)).splitlines() if " " in line)


def _amd_name(target: int, memory_bytes: int) -> str:
    """Return the name of the catalog entry with an AMD architecture.

    If several entries match (MI300X, MI325X), the entry whose memory size is nearest is returned.
    """
    matches = [(name, entry) for name, entry in table("accelerators").items() if target in entry["gfx"]]
    if not matches:
        return f"gfx target {target}"
    return min(matches, key=lambda item: abs(item[1]["usable_gib"] * _GIB - memory_bytes))[0]

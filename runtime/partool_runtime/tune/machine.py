"""The GPU that is measured."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from partool_kernels.device import architecture, has_triton
from partool_kernels.timing import CudaTimer, Timer


class NoMachineError(Exception):
    """Error if no GPU is available for measurements; the text gives the reason."""


@dataclass(frozen=True)
class TuningMachine:
    """Device that kernels are timed on, and facts recorded about it."""

    device: torch.device
    architecture: str
    name: str
    """Name of the device, as the driver reports it."""
    units: int
    """Multiprocessors or compute units."""
    driver: str
    triton: str
    """Full version of Triton."""
    timer: Timer

    @property
    def minor(self) -> str:
        """Triton's major and minor version."""
        return ".".join(self.triton.split(".")[:2])


def this_machine() -> TuningMachine:
    """Return this process's GPU; raises :class:`NoMachineError`."""
    if not has_triton():
        raise NoMachineError("Triton is not installed")
    if not torch.cuda.is_available():
        raise NoMachineError("torch finds no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    architecture_name = architecture(device)
    properties: Any = torch.cuda.get_device_properties(device)
    if architecture_name is None:
        raise NoMachineError(f"no kernels are compiled for {properties.name}")
    import triton

    return TuningMachine(
        device, architecture_name, str(properties.name), int(properties.multi_processor_count), _driver(),
        triton.__version__, CudaTimer(device),
    )  # fmt: skip


def _driver() -> str:
    """Return the driver's version; empty where the driver's tool does not report it."""
    amd = torch.version.hip is not None
    command = ["cat", "/sys/module/amdgpu/version"] if amd else [
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    ]  # fmt: skip
    try:
        versions = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return versions[0] if versions else ""

"""Keeps optimizer states, parameters and activations in host memory or on disks instead of device memory."""

from partool_runtime.offload.activations import Activations
from partool_runtime.offload.host import Slabs
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.parameters import HostParameters

__all__ = ["Activations", "HostMemory", "HostParameters", "Slabs"]

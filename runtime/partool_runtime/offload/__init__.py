"""What is kept in host memory instead of device memory."""

from partool_runtime.offload.activations import Activations
from partool_runtime.offload.host import Slabs
from partool_runtime.offload.memory import HostMemory

__all__ = ["Activations", "HostMemory", "Slabs"]

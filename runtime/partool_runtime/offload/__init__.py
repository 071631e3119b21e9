"""What is kept in host memory instead of device memory."""

from partool_runtime.offload.activations import Activations
from partool_runtime.offload.host import Slabs
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.parameters import HostParameters

__all__ = ["Activations", "HostMemory", "HostParameters", "Slabs"]

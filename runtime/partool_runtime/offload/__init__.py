"""What is kept in host memory instead of device memory."""

from partool_runtime.offload.activations import Activations
from partool_runtime.offload.host import Slabs

__all__ = ["Activations", "Slabs"]

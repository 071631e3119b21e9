"""The optimizer under its former name."""

from partool_runtime.optim.device import DeviceOptimizer as AdamW

__all__ = ["AdamW"]

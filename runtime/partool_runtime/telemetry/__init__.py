"""Reports of a rank: event log, console, TensorBoard, and predicted against measured values at the end."""

from partool_runtime.telemetry.recorder import Recorder

__all__ = ["Recorder"]

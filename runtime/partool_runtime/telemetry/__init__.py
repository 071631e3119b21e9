"""What a rank tells about itself: event log, console, TensorBoard, and predicted against measured at the end."""

from partool_runtime.telemetry.recorder import Recorder

__all__ = ["Recorder"]

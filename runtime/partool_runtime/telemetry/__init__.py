"""Reports of a rank: event log, console, trackers, and a comparison of predicted and measured values at the end."""

from partool_runtime.telemetry._validation import ContinuedPrompt, SetFigures
from partool_runtime.telemetry.recorder import Recorder

__all__ = ["ContinuedPrompt", "Recorder", "SetFigures"]

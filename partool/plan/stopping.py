"""The time that a run needs to stop with a checkpoint, as derived from the plan's predictions."""

from __future__ import annotations

from partool.plan.record import Record
from partool.spec.numbers import Predicted, Rate, Seconds, Times


class Stopping(Record):
    """Parts of the time between a request to stop and the end of the checkpoint that follows.

    ``launch.shutdown_timeout_s`` of the plan holds the time that was decided.
    """

    steps: Times = 1
    """Steps that may pass until the ranks agree to stop: 1, or more with an optimizer whose ranks exchange gradients
    in some steps only."""
    step_s: Rate
    """Predicted seconds of these steps, at the upper error bar of the step time."""
    checkpoint_bytes: Predicted
    """Bytes of a checkpoint that the node with the largest part writes."""
    write_s: Rate
    """Seconds to write one checkpoint, from ``checkpoint_bytes`` and ``devices.storage_bytes_per_s``."""
    writes: Times = 1
    """Checkpoints to wait for: 2 if one that is written in the background may have to end first."""
    needed_s: Seconds
    """Sum of all parts, in whole seconds."""

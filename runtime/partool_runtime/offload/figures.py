"""What the engine counts while it works, for telemetry and benches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class HostFigures:
    """Counters of one rank, since it began."""

    bytes_down: int = 0
    """Gradients that went to host memory."""
    bytes_up: int = 0
    """Weights that came from there."""
    passes_s: float = 0.0
    """Time that passes over optimizer states took, reads from disks included."""
    waited_s: float = 0.0
    """Time that the training loop waited for the engine: what was not hidden."""
    speculated: int = 0
    """Steps that were worked on before their norm was known."""
    rejected: int = 0
    """Speculated steps that had to be done again."""
    put_off: int = 0
    """Buckets that waited for the norm though the step was speculated on: there was no room to undo them."""
    late_buffers: int = 0
    """Buffers that had to be made on the way."""
    early_commits: int = 0
    """Buckets whose last step was committed by a pass of its own, because the buffer of its gradient was needed."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count the time as that of a pass."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.passes_s += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time as waited."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

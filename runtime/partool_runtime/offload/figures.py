"""Counters of the engine, for telemetry and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class HostFigures:
    """Counters of one rank since its start."""

    bytes_down: int = 0
    """Bytes of gradients copied to host memory."""
    bytes_up: int = 0
    """Bytes of weights copied to the device."""
    passes_s: float = 0.0
    """Time of passes over optimizer states, reads from disks included."""
    waited_s: float = 0.0
    """Time that the training loop waited for the engine, whose work did not overlap with compute."""
    speculated: int = 0
    """Steps that were computed before their gradient norm was known."""
    rejected: int = 0
    """Speculated steps that had to be recomputed."""
    put_off: int = 0
    """Buckets that waited for the norm in a speculated step, because there was no room for their undo copies."""
    late_buffers: int = 0
    """Buffers that had to be allocated during the run."""
    early_commits: int = 0
    """Buckets whose last step was committed by a separate pass, because the buffer of its gradient was needed."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Add the time within the context to ``passes_s``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.passes_s += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time within the context to ``waited_s``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

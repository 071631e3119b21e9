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
    """Number of bytes of gradients copied to host memory."""
    bytes_up: int = 0
    """Number of bytes of weights copied to the device."""
    passes_s: float = 0.0
    """Seconds spent in passes over optimizer states, including reads from disks."""
    waited_s: float = 0.0
    """Seconds for which the training loop waited for the engine, because the engine's work took longer than compute."""
    speculated: int = 0
    """Number of steps that were computed before their gradient norm was known."""
    rejected: int = 0
    """Number of speculated steps that had to be recomputed."""
    put_off: int = 0
    """Number of buckets that waited for the norm in a speculated step, as there was no room for undo copies."""
    late_buffers: int = 0
    """Number of buffers that had to be allocated during the run."""
    early_commits: int = 0
    """Number of buckets whose last step was committed by a separate pass, because their gradient buffer was needed."""

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

"""Timing of calls on a device; on GPUs the caches hold no inputs of the call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Run = Callable[[], object]


class Timer(Protocol):
    """Timer of calls, which tests may replace."""

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Return the median seconds of each call; calls run in turns, so that clock drift affects all calls equally."""
        ...


_INFINITY_CACHE_BYTES = 256 * 2**20
"""Last cache before the memory of MI300X to MI355X (AMD, "CDNA 3 Architecture" and "CDNA 4 Architecture")."""


def largest_cache_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's largest cache."""
    second = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    # ROCm reports only the second cache, of one of the device's dies.
    return second if torch.version.hip is None else max(second, _INFINITY_CACHE_BYTES)


class CudaTimer:
    """Timer that records CUDA events around each call; the cache holds none of the call's inputs."""

    _WARM_UPS = 2
    _CACHES = 3
    _LEAST_BYTES = 256 * 2**20
    _FILLS = 4
    """Number of times that the buffer is overwritten before a call; meanwhile the host launches the call."""

    def __init__(self, device: torch.device) -> None:
        """Store the device."""
        self._device = device

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Return the median seconds of each call."""
        # The buffer is not kept between measurements, as a training run needs the memory.
        size = max(self._CACHES * largest_cache_bytes(self._device), self._LEAST_BYTES)
        with torch.cuda.device(self._device):
            buffer = torch.empty(size // 4, dtype=torch.int32, device=self._device)
            for run in runs:
                for _ in range(self._WARM_UPS):
                    run()
            rounds = [[self._timed(run, buffer) for run in runs] for _ in range(repeats)]
            torch.cuda.synchronize(self._device)
        turns = zip(*rounds, strict=True)
        return [statistics.median(start.elapsed_time(stop) * 1e-3 for start, stop in each) for each in turns]

    @staticmethod
    def _timed(run: Run, buffer: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(CudaTimer._FILLS):
            buffer.zero_()
        start.record()
        run()
        stop.record()
        return start, stop


class HostTimer:
    """Timer that reads the host's clock around each call, for calls that return only when they are done, as on CPUs."""

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Return the median seconds of each call."""
        for run in runs:
            run()
        rounds = [[_elapsed_s(run) for run in runs] for _ in range(repeats)]
        return [statistics.median(turn) for turn in zip(*rounds, strict=True)]


def _elapsed_s(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

"""How long calls take on a GPU whose caches are cold, and what stands in for it in tests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Run = Callable[[], object]


class Timer(Protocol):
    """Measures calls."""

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Return the median seconds of each call, taken in turns so that a drift of the clock meets all alike."""
        ...


class CudaTimer:
    """CUDA's events around each call, with a cache that holds nothing of its inputs."""

    _WARM_UPS = 2
    _CACHES = 3
    _LEAST_BYTES = 256 * 2**20

    def __init__(self, device: torch.device) -> None:
        """Take the device; a buffer of several caches' size is kept on it."""
        cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        size = max(self._CACHES * cache, self._LEAST_BYTES)
        self._buffer = torch.empty(size // 4, dtype=torch.int32, device=device)
        self._device = device

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Return the median seconds of each call."""
        with torch.cuda.device(self._device):
            for run in runs:
                for _ in range(self._WARM_UPS):
                    run()
            # Writing the buffer also keeps the GPU busy while the host gets the call ready.
            rounds = [[self._timed(run) for run in runs] for _ in range(repeats)]
            torch.cuda.synchronize(self._device)
        turns = zip(*rounds, strict=True)
        return [statistics.median(start.elapsed_time(stop) * 1e-3 for start, stop in each) for each in turns]

    def _timed(self, run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._buffer.zero_()
        start.record()
        run()
        stop.record()
        return start, stop

"""How long calls take on a device, each with cold caches and in turn with what they are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

ROUNDS = 20
"""Least number of timings whose median counts."""
WARM_UPS = 2
Calls = Mapping[str, Callable[[], Any]]


class Clock(Protocol):
    """A device that calls run on."""

    device: torch.device

    def times_s(self, calls: Calls) -> dict[str, float]:
        """Run every call once and return what each took."""
        ...

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """Return what a call allocates at most beyond what is there before; None where nobody counts."""
        ...


class CudaClock:
    """A GPU, by its own events."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        cache = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)
        # Overwritten before each call: the caches hold nothing of its inputs, and the host is ahead of the device, so
        # that the time between two launches does not count.
        self._others = torch.empty(max(4 * cache, 1 << 29), dtype=torch.uint8, device=self.device)

    def times_s(self, calls: Calls) -> dict[str, float]:
        """Run every call once and return what each took."""
        events = {name: tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for name in calls}
        for name, call in calls.items():
            start, end = events[name]
            self._others.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return {name: start.elapsed_time(end) / 1e3 for name, (start, end) in events.items()}

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """Return what a call allocates at most beyond what is there before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class HostClock:
    """A host in place of a GPU, to try the benchmark itself: its figures say nothing."""

    device = torch.device("cpu")

    def times_s(self, calls: Calls) -> dict[str, float]:
        """Run every call once and return what each took."""
        found = {}
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            found[name] = max(time.perf_counter() - start_s, 1e-9)
        return found

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """Run the call; nobody counts."""
        call()
        return None


@dataclass(frozen=True)
class Times:
    """Medians of calls that were timed in turn."""

    median_s: dict[str, float]
    spread: dict[str, float]
    """Third quartile over first."""
    rounds: int


class TooLateError(Exception):
    """Time ran out before there was a result."""


def in_turn(clock: Clock, calls: Calls, rounds: int, until_s: float) -> Times:
    """Time calls in turn, ``rounds`` times each, or fewer if the monotonic clock passes ``until_s``."""
    for _ in range(WARM_UPS):
        clock.times_s(calls)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        if time.monotonic() > until_s and done < min(3, rounds):
            raise TooLateError(f"only {done} of {rounds} rounds")
        if time.monotonic() > until_s:
            break
        for name, time_s in clock.times_s(calls).items():
            found[name].append(time_s)
    spread = {}
    for name, times in found.items():
        first, _, third = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        spread[name] = third / first
    return Times(
        {name: statistics.median(times) for name, times in found.items()}, spread, len(found[next(iter(found))])
    )

"""Timing of calls on a device, alternating with the calls they are compared with, within the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partool_kernels.timing import CudaTimer, HostTimer, Timer

ROUNDS = 20
"""Default number of timings per call, whose median is taken."""
_LEAST_ROUNDS = 3
"""Smallest number of rounds that is worth reporting."""
Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Clock:
    """A device and the timers that measure it."""

    device: torch.device
    timer: Timer

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """Return the peak bytes that a call allocates beyond those allocated before; None if they are not counted."""
        if self.device.type != "cuda":
            call()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def clock(dry: bool) -> Clock:
    """Return the current GPU, or the host in its place."""
    if dry:
        return Clock(torch.device("cpu"), HostTimer())
    device = torch.device("cuda", torch.cuda.current_device())
    return Clock(device, CudaTimer(device))


@dataclass(frozen=True)
class Times:
    """Medians of calls that were timed in turn."""

    median_s: dict[str, float]
    rounds: int


class TooLateError(Exception):
    """Time ran out before there was a result."""


def in_turn(clock: Clock, calls: Calls, rounds: int, until_s: float) -> Times:
    """Time calls in turn, ``rounds`` times each, or as often as they end before the monotonic clock is ``until_s``."""
    runs = list(calls.values())
    clock.timer.medians_s(runs, 1)  # compiles
    start_s = time.monotonic()
    clock.timer.medians_s(runs, 1)
    now_s = time.monotonic()
    # A single round, which includes the warm-ups, takes longer than each of many rounds.
    fit = int((until_s - now_s) / (now_s - start_s))
    if fit < min(rounds, _LEAST_ROUNDS):
        raise TooLateError(f"time for {max(fit, 0)} of {rounds} rounds")
    rounds = min(rounds, fit)
    return Times(dict(zip(calls, clock.timer.medians_s(runs, rounds), strict=True)), rounds)

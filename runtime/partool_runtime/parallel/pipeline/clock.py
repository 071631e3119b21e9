"""Measures times of actions: by the host's clock, or on a GPU by CUDA events that are read after the step."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from partool.schedule import Action
from partool_runtime.parallel.pipeline.program import Arrival
from partool_runtime.parallel.pipeline.types import Done, Watch
from partool_runtime.parallel.pipeline.wires import Wires


class ActionClock(Protocol):
    """Measures the times of the actions of a watched step."""

    def begin(self) -> None:
        """Start a step."""

    def mark(self) -> Any:
        """Return the current moment, as the start of a compute action."""

    def record_action(self, action: Action, start: Any, waited_s: float, watch: Watch) -> None:
        """Record a compute action that ends at this call; the rank has waited ``waited_s`` for its input."""

    def tell(self, watch: Watch) -> None:
        """Report the remaining actions to ``watch``, at the end of a step."""


def clock_for(device: torch.device) -> ActionClock:
    """Return a :class:`DeviceClock` for a GPU, and a :class:`HostActionClock` for any other device."""
    return DeviceClock() if device.type == "cuda" else HostActionClock()


def received(wires: Wires, arrival: Arrival, watch: Watch) -> tuple[torch.Tensor, float]:
    """Wait for a message; return the message, and the seconds from this call to the arrival of the message."""
    started_s = time.perf_counter()
    message = wires.take(*arrival)
    watch(Done(message.action, message.posted_s, message.there_s))
    return message.x_BSH, message.there_s - started_s


class HostActionClock:
    """Clock of a device that works synchronously with the host."""

    def begin(self) -> None:
        """See :class:`ActionClock`."""

    def mark(self) -> float:
        """See :class:`ActionClock`."""
        return time.perf_counter()

    def record_action(self, action: Action, start: float, waited_s: float, watch: Watch) -> None:
        """See :class:`ActionClock`."""
        watch(Done(action, start, time.perf_counter(), waited_s))

    def tell(self, watch: Watch) -> None:
        """See :class:`ActionClock`."""


class DeviceClock:
    """Clock of a GPU, which works asynchronously: compute actions are reported at the end of the step."""

    def __init__(self) -> None:
        self._noted: list[tuple[Action, torch.cuda.Event, torch.cuda.Event, bool]] = []
        self._origin: tuple[torch.cuda.Event, float] | None = None
        """The same moment on the device's clock and on the host's clock."""

    def begin(self) -> None:
        """See :class:`ActionClock`. The first call waits for the device."""
        self._noted = []
        self._origin = self._origin or self._now()

    def mark(self) -> torch.cuda.Event:
        """See :class:`ActionClock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def record_action(self, action: Action, start: torch.cuda.Event, waited_s: float, watch: Watch) -> None:
        """See :class:`ActionClock`."""
        self._noted.append((action, start, self.mark(), waited_s > 0))

    def tell(self, watch: Watch) -> None:
        """See :class:`ActionClock`.

        If an action waits for an input, its waiting time starts at the end of the previous action.
        """
        assert self._origin is not None
        origin, origin_s = self._origin
        self._origin = self._now()  # The clocks drift apart, so each step has a separate origin.
        free_s = origin_s
        for action, start, stop, waited in self._noted:
            start_s, stop_s = (origin_s + origin.elapsed_time(event) / 1e3 for event in (start, stop))
            watch(Done(action, start_s, stop_s, max(0.0, start_s - free_s) if waited else 0.0))
            free_s = stop_s
        self._noted = []

    def _now(self) -> tuple[torch.cuda.Event, float]:
        event = self.mark()
        event.synchronize()
        return event, time.perf_counter()

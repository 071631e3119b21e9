"""Copies between a device and host memory, in order on lanes of their own, beside compute.

Where the device is the host itself, lanes are threads: the engine that uses them runs there as it does on a GPU, and
what it forgets to wait for shows as wrong numbers.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a lane, or in the work of compute, that others wait for."""

    def wait(self) -> None:
        """Block this thread until everything before the mark is done; raises what went wrong there."""

    def before_compute(self) -> None:
        """Let work that compute is given from now on begin behind the mark."""


class Lane(Protocol):
    """Copies, one after the other."""

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        """Copy behind ``after`` and what the lane was given before. Both tensors have to live until the mark."""


class Lanes(Protocol):
    """A lane to the host, a lane to the device, and compute's own."""

    down: Lane
    up: Lane

    def now(self) -> Mark:
        """Return a mark behind what compute was given so far."""

    def close(self) -> None:
        """End the lanes; copies under way are finished."""


def open_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a device."""
    return StreamLanes(device) if device.type == "cuda" else ThreadLanes()


class _EventMark:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def before_compute(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)


class _StreamLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        if isinstance(after, _EventMark):
            self._stream.wait_event(after._event)
        elif after is not None:
            after.wait()
        with torch.no_grad(), self._stream:
            to.copy_(source, non_blocking=True)
        return _EventMark(self._stream.record_event())


class StreamLanes:
    """Streams of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.down: Lane = _StreamLane(device)
        self.up: Lane = _StreamLane(device)

    def now(self) -> Mark:
        """See :class:`Lanes`."""
        return _EventMark(torch.accelerator.current_stream().record_event())

    def close(self) -> None:
        """See :class:`Lanes`."""


class _ThreadMark:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None = None) -> None:
        self._error = error
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def before_compute(self) -> None:
        self.wait()


class _ThreadLane:
    def __init__(self, name: str, delays: random.Random | None) -> None:
        self._work: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, Mark | None, _ThreadMark] | None]
        self._work = queue.SimpleQueue()
        self._delays = delays
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        mark = _ThreadMark()
        self._work.put((to, source, after, mark))
        return mark

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            to, source, after, mark = work
            try:
                if after is not None:
                    after.wait()
                if self._delays is not None:
                    time.sleep(self._delays.random() * 1e-3)
                with torch.no_grad():
                    to.copy_(source)
            except BaseException as error:
                mark.reach(error)
            else:
                mark.reach()
            work = to = source = after = mark = None  # type: ignore[assignment]  # nothing is kept until the next one


class ThreadLanes:
    """Threads that copy within host memory. ``delays`` are for tests: each copy then waits up to a millisecond."""

    def __init__(self, delays: random.Random | None = None) -> None:
        self._down, self._up = _ThreadLane("partool-down", delays), _ThreadLane("partool-up", delays)
        self.down: Lane = self._down
        self.up: Lane = self._up

    def now(self) -> Mark:
        """See :class:`Lanes`: the host's own work is done when it returns."""
        mark = _ThreadMark()
        mark.reach()
        return mark

    def close(self) -> None:
        """See :class:`Lanes`."""
        self._down.close()
        self._up.close()

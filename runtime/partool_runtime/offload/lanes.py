"""Copies between a device and host memory, in order on lanes of their own, beside compute.

Where the device is the host itself, lanes are threads: the engine that uses them runs there as it does on a GPU, and
what it forgets to wait for shows as wrong numbers.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from contextlib import suppress
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a lane, or in the work of compute, that others wait for."""

    def wait(self) -> None:
        """Block this thread until everything before the mark is done; raises what went wrong there."""

    def done(self) -> bool:
        """Tell whether :meth:`wait` would return, or raise, at once."""

    def before_compute(self) -> None:
        """Let work that compute is given from now on begin behind the mark."""


class CopyLane(Protocol):
    """Copies, one after the other."""

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        """Copy behind ``after`` and what the lane was given before. Both tensors have to live until the mark."""


class Lanes(Protocol):
    """A lane to the host, a lane to the device, and compute's own."""

    down: CopyLane
    up: CopyLane

    def now(self) -> Mark:
        """Return a mark behind what compute was given so far."""

    def room(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the device, uint8, that the lane up may write to behind its copies so far.

        What compute draws on is free for a copy only behind compute's own work; this need not wait for that. Compute
        uses it behind the copy's mark, and it is given back as soon as the lane up is behind that use.
        """

    def close(self) -> None:
        """End the lanes; copies under way are finished."""


def open_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a device."""
    return StreamLanes(device) if device.type == "cuda" else ThreadLanes()


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Who waits for it sleeps: a host thread that spins would take a core from training or from the optimizer.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._device = stream.device

    def wait(self) -> None:
        with torch.cuda.device(self._device):  # a thread that never chose one would take memory of the first device
            self._event.synchronize()

    def done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def before_compute(self) -> None:
        self.before(torch.cuda.current_stream())

    def before(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class _StreamLane:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        if isinstance(after, _EventMark):
            after.before(self.stream)
        elif after is not None:
            after.wait()
        with torch.no_grad(), torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        return _EventMark(self.stream)


class StreamLanes:
    """Streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._down, self._up = device, _StreamLane(device), _StreamLane(device)
        self.down: CopyLane = self._down
        self.up: CopyLane = self._up

    def now(self) -> Mark:
        """See :class:`Lanes`."""
        return _EventMark(torch.cuda.current_stream(self._device))

    def room(self, size_bytes: int) -> torch.Tensor:
        """See :class:`Lanes`: the allocator knows it as the lane's stream's."""
        with torch.inference_mode(False), torch.cuda.stream(self._up.stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """See :class:`Lanes`. What went wrong on the device was raised before, or no longer matters."""
        with suppress(RuntimeError):
            self._down.stream.synchronize()
            self._up.stream.synchronize()


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

    def done(self) -> bool:
        return self._reached.is_set()

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
        if self._thread is not threading.current_thread():  # where the owner was collected on this very thread
            self._thread.join()

    def _run(self) -> None:
        failed: BaseException | None = None  # of any copy: whoever waits for a later one relies on it, too
        while (work := self._work.get()) is not None:
            to, source, after, mark = work
            try:
                if failed is not None:
                    raise failed
                if after is not None:
                    after.wait()
                if self._delays is not None:
                    time.sleep(self._delays.random() * 1e-3)
                with torch.no_grad():
                    to.copy_(source)
            except BaseException as error:
                failed = error
                mark.reach(error)
            else:
                mark.reach()
            work = to = source = after = mark = None  # type: ignore[assignment]  # nothing is kept until the next one


class ThreadLanes:
    """Threads that copy within host memory. ``delays`` are for tests: each copy then waits up to a millisecond."""

    def __init__(self, delays: random.Random | None = None) -> None:
        self._down, self._up = _ThreadLane("partool-down", delays), _ThreadLane("partool-up", delays)
        self.down: CopyLane = self._down
        self.up: CopyLane = self._up

    def now(self) -> Mark:
        """See :class:`Lanes`: the host's own work is done when it returns."""
        mark = _ThreadMark()
        mark.reach()
        return mark

    def room(self, size_bytes: int) -> torch.Tensor:
        """See :class:`Lanes`: memory is nobody's who does not hold it."""
        with torch.inference_mode(False):
            return torch.empty(size_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """See :class:`Lanes`."""
        self._down.close()
        self._up.close()

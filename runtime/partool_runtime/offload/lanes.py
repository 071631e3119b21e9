"""Copies between a device and host memory while compute runs; each lane (stream or thread) copies in order.

On a CPU lanes are threads, so the engine works as on a GPU, and a missing wait shows as wrong numbers in tests.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from contextlib import suppress
from typing import Protocol

import torch

from partool_runtime import threads


class Mark(Protocol):
    """A point in the queue of work of a lane or of compute; threads and later work can wait for it."""

    def wait(self) -> None:
        """Block this thread until all work before the mark is done; raises an error of that work."""

    def done(self) -> bool:
        """Return True if :meth:`wait` would return or raise without blocking."""

    def before_compute(self) -> None:
        """Make all work that is queued on compute after this call wait for the mark."""


class CopyLane(Protocol):
    """Queue of copies that run one after the other."""

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        """Queue a copy that starts after ``after`` and after the lane's earlier copies; return the mark after the copy.

        Both tensors must live until the returned mark.
        """


class Lanes(Protocol):
    """The lane of copies to the host (``down``), the lane of copies to the device (``up``), and marks of compute."""

    down: CopyLane
    up: CopyLane

    def now(self) -> Mark:
        """Return the mark after all work that is queued on compute so far."""

    def room(self, size_bytes: int) -> torch.Tensor:
        """Return ``size_bytes`` of device memory (uint8) that the lane ``up`` may write to after its earlier copies.

        Memory from compute's pool could be overwritten only after compute's queued work; the returned memory can be
        overwritten earlier. Compute may use it after the copy's mark. It may be freed once the lane ``up`` has been
        made to wait for compute's use.
        """

    def close(self) -> None:
        """Finish the copies in flight and end the lanes."""


def open_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a device."""
    return StreamLanes(device) if device.type == "cuda" else ThreadLanes()


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a waiting thread that spins would take a core from training or from the optimizer.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
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
    """Lanes of a GPU, which are streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._down, self._up = device, _StreamLane(device), _StreamLane(device)
        self.down: CopyLane = self._down
        self.up: CopyLane = self._up

    def now(self) -> Mark:
        """See :class:`Lanes`."""
        return _EventMark(torch.cuda.current_stream(self._device))

    def room(self, size_bytes: int) -> torch.Tensor:
        """See :class:`Lanes`. The memory is allocated on the stream of the lane ``up``."""
        with torch.inference_mode(False), torch.cuda.stream(self._up.stream):
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """See :class:`Lanes`. Errors of the device are not raised: they were raised earlier, or no longer matter."""
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
        self._thread = threads.start(self._run, name)

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        mark = _ThreadMark()
        self._work.put((to, source, after, mark))
        return mark

    def close(self) -> None:
        self._work.put(None)
        if self._thread is not threading.current_thread():  # the owner may be garbage-collected on this very thread
            self._thread.join()

    def _run(self) -> None:
        failed: BaseException | None = None  # raised by later waits, too, whose copies rely on this one
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
            work = to = source = after = mark = None  # type: ignore[assignment]  # frees tensors while idle


class ThreadLanes:
    """Threads that copy within host memory. With ``delays``, for tests, each copy first waits up to a millisecond."""

    def __init__(self, delays: random.Random | None = None) -> None:
        self._down, self._up = _ThreadLane("partool-down", delays), _ThreadLane("partool-up", delays)
        self.down: CopyLane = self._down
        self.up: CopyLane = self._up

    def now(self) -> Mark:
        """See :class:`Lanes`. Compute on a CPU is synchronous, so the mark is already reached."""
        mark = _ThreadMark()
        mark.reach()
        return mark

    def room(self, size_bytes: int) -> torch.Tensor:
        """See :class:`Lanes`. The memory is ordinary host memory, which no queued work uses."""
        with torch.inference_mode(False):
            return torch.empty(size_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """See :class:`Lanes`."""
        self._down.close()
        self._up.close()

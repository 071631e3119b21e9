"""Runs jobs in order, in parallel with compute: on a CPU in a thread (as waiting blocks), on a GPU in a stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from partool_runtime import threads

T = TypeVar("T")


class Ticket(Generic[T]):
    """Handle of a job that was submitted to a :class:`Lane`."""

    def __init__(self, future: Future[T], event: torch.Event | None = None) -> None:
        self._future, self._event = future, event

    @property
    def ended(self) -> bool:
        """Whether the job has ended, with a result or with an error."""
        return self._future.done()

    def wait(self) -> T:
        """Return the job's result, or raise its error; on a GPU the current stream waits for the job's work."""
        result = self._future.result()
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        return result


class Lane:
    """Runs jobs one after the other; after a job raises an error, all later jobs raise the same error.

    On a CPU a thread runs the jobs. On a GPU a transfer only makes streams wait, so jobs run in the caller's thread at
    once, on a stream that waits for the work queued on the caller's stream so far. Jobs set their timeouts themselves.
    """

    def __init__(self, name: str, device: torch.device, *, threaded: bool = True) -> None:
        """Without ``threaded``, as in a dry run, jobs run at once in the caller's thread on a CPU, too."""
        self._threaded = threaded and device.type != "cuda"
        self._stream = torch.Stream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        if self._threaded:
            self._thread = threads.start(self._work, name)

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Queue a job."""
        future: Future[T] = Future()
        if self._threaded:
            self._jobs.put(lambda: self._do(job, future))
            return Ticket(future)
        if self._stream is None:
            self._do(job, future)
            return Ticket(future)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            self._do(job, future)
        return Ticket(future, self._stream.record_event())

    def close(self) -> None:
        """End the thread once its jobs are done; a second call does nothing."""
        if self._threaded and self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _do(self, job: Callable[[], T], future: Future[T]) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        try:
            future.set_result(job())
        except BaseException as error:
            self._failure = error
            future.set_exception(error)

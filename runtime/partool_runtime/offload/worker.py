"""Thread that runs optimizer passes one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from partool_runtime import threads

Work = Callable[[], object]


class PassWorker(Protocol):
    """Runs jobs in order. After an error no further job runs, and methods that wait raise the error."""

    def put(self, work: Work) -> None:
        """Queue a job."""

    def drain(self) -> None:
        """Wait until all queued jobs are done; raise the error of a job that failed."""

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()`` is True or all jobs are done; raise the error of a job that failed."""

    def check(self) -> None:
        """Raise the error of an earlier job, if any."""

    def close(self) -> None:
        """End after the queued jobs; errors are not raised again."""


class SerialWorker:
    """See :class:`PassWorker`; jobs run on a thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._turn = threading.Condition()
        self._pending = 0
        self._error: BaseException | None = None
        self._thread = threads.start(self._run, name)

    def put(self, work: Work) -> None:
        """See :class:`PassWorker`."""
        with self._turn:
            self._pending += 1
        self._work.put(work)

    def drain(self) -> None:
        """See :class:`PassWorker`."""
        self.wait_for(lambda: False)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """See :class:`PassWorker`."""
        with self._turn:
            self._turn.wait_for(lambda: self._pending == 0 or self._error is not None or ready())
        self.check()

    def check(self) -> None:
        """See :class:`PassWorker`."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """See :class:`PassWorker`."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            error = None
            if self._error is None:
                try:
                    work()
                except BaseException as raised:  # raised again where the training loop waits
                    error = raised
            work = None  # frees the job's tensors while idle
            with self._turn:
                self._error = self._error or error
                self._pending -= 1
                self._turn.notify_all()

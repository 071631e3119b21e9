"""The thread that optimizer passes are made on, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], object]


class SerialWorker:
    """Does what it is given, in order. After an error nothing more is done, and whoever waits gets the error."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._turn = threading.Condition()
        self._left = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Have something done behind what was given before."""
        with self._turn:
            self._left += 1
        self._work.put(work)

    def drain(self) -> None:
        """Return when everything given so far is done; raises what went wrong."""
        self.wait_for(lambda: False)

    def wait_for(self, there: Callable[[], bool]) -> None:
        """Return when ``there`` says so, or when nothing is left to do; raises what went wrong."""
        with self._turn:
            self._turn.wait_for(lambda: self._left == 0 or self._error is not None or there())
        self.check()

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread behind what it was given; what went wrong is not raised again."""
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
            work = None  # nothing is kept alive until the next one
            with self._turn:
                self._error = self._error or error
                self._left -= 1
                self._turn.notify_all()

"""A clock for timeouts that pauses while this process is suspended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

_LONGEST_GAP_S = 3.0
"""Maximum seconds between two readings while the process runs; agents read their clock at least once a second."""


class AwakeClock:
    """A clock in seconds that stands still while this process is suspended.

    A job that a scheduler suspends, or a frozen machine, receives no messages. With an ordinary clock, all other nodes
    would afterwards seem to have been silent for long, and every deadline would seem to have passed. The clock must be
    read often.
    """

    def __init__(self, source: Callable[[], float] | None = None) -> None:
        self._source = source or monotonic
        self._last = self._source()
        self._away_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the time in seconds; only the difference between two times has a meaning."""
        with self._lock:
            at = self._source()
            gap, self._last = at - self._last, at
            if gap > _LONGEST_GAP_S:
                self._away_s += gap
            return at - self._away_s

"""A clock for waiting on others that does not run while this process cannot hear them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

_LONGEST_GAP_S = 3.0
"""Agents look at their clock at least once a second, so that a longer gap means that they did not run at all."""


class AwakeClock:
    """Seconds that stand still while this process does.

    A job that a scheduler suspends, or a machine that is frozen, misses everything others say. Afterwards all of them
    seem to have been silent for long, and every deadline to be over, although none had its time. To be looked at often.
    """

    def __init__(self, source: Callable[[], float] | None = None) -> None:
        self._source = source or monotonic
        self._last = self._source()
        self._away_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the time, of use for differences only."""
        with self._lock:
            at = self._source()
            gap, self._last = at - self._last, at
            if gap > _LONGEST_GAP_S:
                self._away_s += gap
            return at - self._away_s

"""Stop requests from signals, agreed on by all ranks at a step boundary."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGINT})
"""Signals that request a stop; SIGUSR2 and not SIGUSR1, which NCCL may use itself."""


class StopRequest:
    """A flag that signals raise and ranks agree on.

    A signal may reach one rank only, or ranks at different steps. Acting on the flag alone would leave other ranks
    waiting in a collective, so every rank calls :meth:`agree` at every step boundary, and all act on the same answer.
    """

    def __init__(self, starting: Path | None = None) -> None:
        self._starting = starting
        self.agreed_step: int | None = None
        """Steps done when the ranks agreed to stop."""
        self._signal = 0
        self._maximum_over_ranks: Callable[[int], int] = _same

    @property
    def requested(self) -> bool:
        """True once this rank got a signal, or :meth:`agree` found that any rank did."""
        return self._signal != 0

    @property
    def reason(self) -> str:
        """Name of the signal, such as ``SIGTERM``; empty while nothing was requested."""
        return signal.Signals(self._signal).name if self._signal else ""

    def install(self) -> None:
        """Handle the stop signals, including pending ones: the agent starts ranks with stop signals blocked."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS | {signal.SIGHUP})

    def retire(self) -> None:
        """Ignore stop signals from here on, for a rank that is about to end.

        The interpreter restores the signals' default action while it shuts down, so that a later signal would kill a
        rank that has completed its work.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def use(self, maximum_over_ranks: Callable[[int], int]) -> None:
        """Set the all-reduce of :meth:`agree`: a collective that returns the largest of the ranks' integers."""
        self._maximum_over_ranks = maximum_over_ranks

    def begin(self) -> None:
        """Signal the agent, by removing the file ``starting``, that this rank handles stop requests from now on.

        Until then, while ranks import, connect, load, compile and take the first step, the agent ends the ranks itself.
        """
        if self._starting is not None:
            with contextlib.suppress(OSError):
                self._starting.unlink(missing_ok=True)
            self._starting = None

    def agree(self, step: int) -> bool:
        """Return True on all ranks if a stop was requested on any; a collective, called by all after ``step`` steps."""
        self.begin()  # before any rank can have agreed: nothing is saved until all ranks have begun
        agreed = self._maximum_over_ranks(self._signal)
        self._signal = self._signal or agreed  # a signal that arrived meanwhile is handled at the next step
        if agreed and self.agreed_step is None:
            self.agreed_step = step
        return agreed != 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number


def _same(value: int) -> int:
    return value

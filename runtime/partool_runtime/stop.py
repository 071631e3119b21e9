"""Stop requests from signals, agreed on by all ranks at a step boundary."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGINT})
_ORDERED = tuple(sorted(int(number) for number in STOP_SIGNALS))
"""Signals that request a stop; they include SIGUSR2 instead of SIGUSR1, because NCCL may use SIGUSR1 itself."""


class StopRequest:
    """A stop request that signals set on single ranks and that all ranks agree on.

    A signal may reach one rank only, or may reach ranks at different steps. A rank that stopped at its signal would
    leave other ranks waiting in a collective. So all ranks add up their :meth:`flags` within a step, and every rank
    calls :meth:`heard` with the sums after the step, and stops if the answer is True. Outside of training steps
    :meth:`agree` does both.
    """

    def __init__(self, starting: Path | None = None) -> None:
        self._starting = starting
        self._begun = False
        self.agreed_step: int | None = None
        """Number of completed steps when the ranks agreed to stop."""
        self._signal = 0
        self._maximum_over_ranks: Callable[[int], int] = _same

    @property
    def requested(self) -> bool:
        """True once this rank got a signal, or :meth:`agree` found that another rank got one."""
        return self._signal != 0

    @property
    def reason(self) -> str:
        """Name of the signal, such as ``SIGTERM``; empty while nothing was requested."""
        return signal.Signals(self._signal).name if self._signal else ""

    def install(self) -> None:
        """Handle stop signals, also those that are pending because the agent starts ranks with stop signals blocked."""
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
        """Set the collective that :meth:`agree` calls; it must return the largest of the ranks' integers."""
        self._maximum_over_ranks = maximum_over_ranks

    def begin(self) -> None:
        """Remove the file ``starting``, to tell the agent that this rank handles stop requests from now on.

        While the file exists, the agent ends the rank itself: the rank imports, connects, loads, compiles and takes its
        first step.
        """
        if self._starting is not None:
            with contextlib.suppress(OSError):
                self._starting.unlink(missing_ok=True)
            self._starting = None

    def flags(self) -> list[float]:
        """Return for each stop signal, in the order of their numbers, 1 if this rank got it first, else 0."""
        return [float(number == self._signal) for number in _ORDERED]

    def heard(self, flags: Sequence[float], step: int) -> bool:
        """Return True if any rank's flag is in ``flags``, the sums of all ranks' :meth:`flags` within step ``step``.

        The first call is a collective, and so is to be made by all ranks.
        """
        if not self._begun:
            return self.agree(step)
        return self._agreed(max((n for n, flag in zip(_ORDERED, flags, strict=True) if flag), default=0), step)

    def agree(self, step: int) -> bool:
        """Return True on all ranks if any rank has a stop request; a collective, to be called after ``step`` steps."""
        self.begin()  # before any rank can have agreed: nothing is saved until all ranks have begun
        self._begun = True
        return self._agreed(self._maximum_over_ranks(self._signal), step)

    def _agreed(self, agreed: int, step: int) -> bool:
        self._signal = self._signal or agreed  # a signal that arrived meanwhile is handled at the next step
        if agreed and self.agreed_step is None:
            self.agreed_step = step
        return agreed != 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number


def _same(value: int) -> int:
    return value

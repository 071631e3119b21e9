"""Timers of a step's terms: the host's clock, or pairs of CUDA events that are read only when a step is logged."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from partool.plan.terms import TIME_TERMS

HOST_TERMS = frozenset({"data", "overhead"})
"""Terms during which the host works or waits, timed with the host's clock on every device."""


class Clock(Protocol):
    """A source of time marks."""

    def mark(self) -> Any:
        """Return a mark of the current time."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; may wait until the device has reached both."""


class HostClock:
    """A clock whose marks are readings of ``time.perf_counter``, or of another function that returns seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark = now

    def elapsed_s(self, start: float, end: float) -> float:
        """Return the difference of two marks, in seconds."""
        return end - start


class CudaClock:
    """A clock whose marks are CUDA events on the current stream: recording an event does not wait for the device."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Wait for the later event and return the difference."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Spans:
    """Collects the timed spans of one step; :meth:`timer` gives the context manager of a term.

    A span has a term, a clock, a start mark and an end mark.

    ``on_enter`` and ``on_exit`` are called with the term, inside the timer, in the sampled step.
    """

    def __init__(self, device: Clock, host: Clock) -> None:
        self.open: str | None = None
        self.begun = False
        """Whether a timer was used since the last :meth:`take`."""
        self.on_enter: Callable[[str], None] | None = None
        self.on_exit: Callable[[str], None] | None = None
        self._spans: list[tuple[str, Clock, Any, Any]] = []
        self._timers = {term: _Timer(self, term, host if term in HOST_TERMS else device) for term in TIME_TERMS}

    def timer(self, term: str) -> _Timer:
        """Return the timer of a term; raises ValueError for an unknown term."""
        try:
            return self._timers[term]
        except KeyError:
            raise ValueError(f"unknown time term {term!r}; known: {', '.join(TIME_TERMS)}") from None

    def add(self, term: str, clock: Clock, start: Any, end: Any) -> None:
        """Add a span whose start and end marks were taken elsewhere."""
        self._spans.append((term, clock, start, end))

    def take(self) -> list[tuple[str, Clock, Any, Any]]:
        """Return the spans since the last call, each as (term, clock, start mark, end mark)."""
        spans, self._spans = self._spans, []
        self.begun = False
        return spans


class _Timer:
    """Context manager of one term; it can be reused, since terms do not nest."""

    __slots__ = ("_clock", "_spans", "_start", "_term")

    def __init__(self, spans: Spans, term: str, clock: Clock) -> None:
        self._spans = spans
        self._term = term
        self._clock = clock
        self._start: Any = None

    def __enter__(self) -> None:
        spans = self._spans
        if spans.open is not None:
            raise RuntimeError(f"timer {self._term!r} inside timer {spans.open!r}: terms do not nest")
        spans.open = self._term
        spans.begun = True
        if spans.on_enter is not None:
            spans.on_enter(self._term)
        self._start = self._clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        spans = self._spans
        spans.add(self._term, self._clock, self._start, self._clock.mark())
        spans.open = None
        if spans.on_exit is not None:
            spans.on_exit(self._term)


def seconds_per_term(spans: list[tuple[str, Clock, Any, Any]]) -> dict[str, float]:
    """Return the seconds of all spans of each term; waits for the device if the device's clock timed a span."""
    seconds: dict[str, float] = {}
    for term, clock, start, end in spans:
        seconds[term] = seconds.get(term, 0.0) + clock.elapsed_s(start, end)
    return seconds

"""Time that the training thread spends inside collectives, where they block it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from partool_runtime.telemetry._timers import HostClock, Spans

_TERMS = {
    "all_gather_single": "parameter_gather",
    "all_gather_into_tensor": "parameter_gather",
    "reduce_scatter_single": "gradient_sync",
    "reduce_scatter_tensor": "gradient_sync",
    "all_reduce": "gradient_sync",
}
"""Functions of ``torch.distributed`` that FSDP2 looks up at every call, and the term they belong to."""
_PASSES = ("forward", "backward")


class BlockingCollectives:
    """Times the collectives called inside the timers ``forward`` and ``backward``, and takes them out of these.

    For the CPU, where FSDP2's collectives return when they are done. While installed, the functions of
    ``torch.distributed`` are replaced by ones that read the clock before and after, about a microsecond each. Calls
    with ``async_op=True`` do not block; their terms are named in ``asynchronous`` and have no measured time.
    """

    def __init__(self, spans: Spans, clock: HostClock) -> None:
        self.asynchronous: set[str] = set()
        self._spans = spans
        self._clock = clock
        self._thread = threading.get_ident()
        self._inside = False
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def install(self) -> None:
        """Begin to time."""
        for name, term in _TERMS.items():
            original = getattr(dist, name, None)  # older releases lack some
            if original is not None:
                self._replaced[name] = original, self._timed(original, term)
                setattr(dist, name, self._replaced[name][1])

    def remove(self) -> None:
        """Put the original functions back; calling again does nothing."""
        for name, (original, ours) in self._replaced.items():
            if getattr(dist, name) is ours:
                setattr(dist, name, original)
        self._replaced.clear()

    def _timed(self, function: Callable[..., Any], term: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = self._spans.open
            if outer not in _PASSES or self._inside or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            if kwargs.get("async_op"):
                self.asynchronous.add(term)
                return function(*args, **kwargs)
            self._inside = True
            start = self._clock.mark()
            try:
                return function(*args, **kwargs)
            finally:
                end = self._clock.mark()
                self._inside = False
                self._spans.add(term, self._clock, start, end)
                self._spans.add(outer, self._clock, end, start)  # negative: a term's own time only

        return call

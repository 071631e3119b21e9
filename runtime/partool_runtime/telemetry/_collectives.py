"""Time that the training thread spends inside collectives that block it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from partool_runtime.parallel.comm import SEQUENCE
from partool_runtime.telemetry._timers import HostClock, Spans
from partool_runtime.torch_internals.collectives import watch_waits

_TERMS = {
    "all_gather_single": "parameter_gather",
    "all_gather_into_tensor": "parameter_gather",
    "reduce_scatter_single": "gradient_sync",
    "reduce_scatter_tensor": "gradient_sync",
    "all_reduce": "gradient_sync",
}
"""Time term of each ``torch.distributed`` function that FSDP2 looks up by name at every call."""
_PASSES = ("forward", "backward")
TENSOR = "tensor_parallel"
EXCHANGES = (TENSOR, SEQUENCE)
"""Time terms of the exchanges of tensor and sequence parallelism; forward and backward passes wait for these
exchanges."""


class BlockingCollectives:
    """Times the collectives inside the timers ``forward`` and ``backward``, and subtracts their time from these timers.

    Used on the CPU, where FSDP2's collectives return when they are done, and where the collectives of tensor and
    sequence parallelism block.
    While installed, the functions of ``torch.distributed`` are replaced by functions that also read the clock before
    and after, which takes about a microsecond. Calls with ``async_op=True`` do not block; their terms are named in
    ``asynchronous`` and have no measured time.
    """

    def __init__(self, spans: Spans, clock: HostClock) -> None:
        self.asynchronous: set[str] = set()
        self._spans = spans
        self._clock = clock
        self._thread = threading.get_ident()
        self._inside = False
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def install(self) -> None:
        """Start timing."""
        for name, term in _TERMS.items():
            original = getattr(dist, name, None)  # older releases of torch lack some of the functions
            if original is not None:
                self._replaced[name] = original, self._timed(original, term)
                setattr(dist, name, self._replaced[name][1])
        watch_waits(self._measured)

    def remove(self) -> None:
        """Restore the original functions; calling again does nothing."""
        for name, (original, ours) in self._replaced.items():
            if getattr(dist, name) is ours:
                setattr(dist, name, original)
        if self._replaced:
            watch_waits(None)
        self._replaced.clear()

    def _timed(self, function: Callable[..., Any], term: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("async_op"):
                with self._measured(term):
                    return function(*args, **kwargs)
            if self._counts():
                self.asynchronous.add(term)
            return function(*args, **kwargs)

        return call

    def _counts(self) -> bool:
        """Return whether the current call is inside a pass and not inside another measured call."""
        return self._spans.open in _PASSES and not self._inside and threading.get_ident() == self._thread

    @contextmanager
    def _measured(self, term: str) -> Iterator[None]:
        outer = self._spans.open
        if outer is None or not self._counts():
            yield
            return
        self._inside = True
        start = self._clock.mark()
        try:
            yield
        finally:
            end = self._clock.mark()
            self._inside = False
            self._spans.add(term, self._clock, start, end)
            self._spans.add(outer, self._clock, end, start)  # a negative span: excludes this time from the outer term

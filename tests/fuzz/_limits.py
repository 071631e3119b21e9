"""Limits of processor seconds and memory for one case; exceeding one fails the case like a raised exception."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TooLongError(Exception):
    """A case has used up its processor time."""


@contextmanager
def bounded(cpu_s: float, memory_gib: float) -> Iterator[None]:
    """Raise :class:`TooLongError` after so much processor time, and MemoryError where a case takes more memory."""

    def end(*_: Any) -> None:
        raise TooLongError(f"more than {cpu_s:g} s of processor time")

    old = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGPROF, end)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + int(memory_gib * 2**30), old[1]))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_AS, old)


def _mapped_bytes() -> int:
    """Return the bytes of this process's address space, which RLIMIT_AS limits."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()

"""Tells a terminal what long work is at; lets Ctrl-C end a search with the best layout so far."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TextIO

from partool.plan.terminal import say

if TYPE_CHECKING:
    from types import FrameType

    from partool.planner.problem import SearchBudget

_AFTER_S, _EVERY_S = 1.0, 0.2
"""Seconds after which a line appears, and after which it is rewritten."""


@contextmanager
def watched(budget: SearchBudget, after_s: float = _AFTER_S) -> Iterator[None]:
    """Return a context manager within which Ctrl-C ends searches early, and terminals show a line after ``after_s``.

    The first Ctrl-C ends the search with the best layout so far; before a layout is known that may fit, and from
    the second time on, it raises KeyboardInterrupt.
    """
    from partool.planner.problem import Stopped

    with _interruptible(budget), live_line(partial(line, budget), sys.stderr, after_s):
        try:
            yield
        except Stopped as stopped:
            raise KeyboardInterrupt from stopped
    if budget.stopped and budget.reached_limit:
        say("partool: interrupted: this is the best of the layouts that were searched so far", err=True)


@contextmanager
def _interruptible(budget: SearchBudget) -> Iterator[None]:
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        # Another handler, or a command whose interrupts are ignored; only the main thread may handle signals.
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if budget.stopped or not (budget.has_best or budget.has_fitting):
            raise KeyboardInterrupt
        budget.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def live_line(line: Callable[[float], str], stream: TextIO, after_s: float = _AFTER_S) -> Iterator[None]:
    """Rewrite a line on a terminal until the context ends, then remove it; ``line`` is given the seconds so far."""
    if not stream.isatty():
        yield
        return
    stop, start = threading.Event(), time.monotonic()

    def tell() -> None:
        wait_s = after_s
        while not stop.wait(wait_s):
            text = line(time.monotonic() - start)[: shutil.get_terminal_size().columns - 1]
            stream.write(f"\r{text}\x1b[K")
            stream.flush()
            wait_s = _EVERY_S
        if wait_s != after_s:
            stream.write("\r\x1b[K")
            stream.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        stop.set()
        teller.join()


def line(budget: SearchBudget, seconds: float) -> str:
    """Return one line that says what is searched, how much has been priced, and the best step time so far."""
    best = f"; best {budget.best_s:.3g} s per step, Ctrl-C takes it" if budget.has_best else ""
    return f"partool: {seconds:.0f} s, searching {budget.subject or 'layouts'}: {budget.rows:,} prices{best}"

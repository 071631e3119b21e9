"""What the starter of a tracker's process tells it on standard input, and what it answers on standard output."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Literal

END_S = 5
"""Seconds that a tracker has at the end of an attempt."""

Answer = Literal["url", "problem"]


class Orders:
    """The lines of standard input: the run as JSON, then ``end`` once all events are written, or ``end S``.

    After ``end S``, or ``S = END_S`` where the starter has ended without a word, the kernel ends this process S seconds
    later: a tracker that hangs outlives nobody for long.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._buffer = b""
        self._closed = False
        self._ended = False

    def first_line(self) -> str:
        """Return the first line, once it is complete."""
        while b"\n" not in self._buffer and not self._closed:
            self._take()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def ended(self, wait_s: float) -> bool:
        """Return whether no events follow; waits up to ``wait_s`` seconds for that."""
        until = time.monotonic() + wait_s
        while not self._ended:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer, self._ended = rest, True
                _limit(line.removeprefix(b"end").strip().decode())
            elif self._closed:
                self._ended = True
                _limit(str(END_S))
            elif select.select([self._descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
                self._take()
            else:
                return False
        return True

    def _take(self) -> None:
        data = os.read(self._descriptor, 1 << 16)
        self._buffer += data
        self._closed = not data


def _limit(seconds: str) -> None:
    if seconds:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds) + 1)


class Answers:
    """Lines of JSON for the starter. What libraries print goes to standard error instead, which is a log file."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.set_inheritable(self._descriptor, False)
        os.dup2(2, 1)

    def give(self, kind: Answer, text: str) -> None:
        """Write a line; nobody may be there to read it."""
        try:
            os.write(self._descriptor, (json.dumps({kind: text}) + "\n").encode())
        except OSError:
            pass

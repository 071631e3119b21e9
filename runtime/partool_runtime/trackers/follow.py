"""Follows the event log of rank 0 and hands its figures to a tracker."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from partool.plan.event_log import Event, last_events, read_new_events
from partool_runtime.errors import EXIT_FAILED
from partool_runtime.trackers.figures import row_of
from partool_runtime.trackers.types import FigureRow, Tracker

FOLDER = "trackers"
"""Folder of a run with one bookmark per tracker."""
_POLL_S = 1.0
_CHUNK_BYTES = 1 << 23
_LOCK_S = 20.0
"""Seconds to wait for the process of the attempt before, which has :data:`partool_runtime.trackers.orders.END_S`."""


class EndSignal(Protocol):
    """Says whether the log is complete (:class:`partool_runtime.trackers.orders.Orders`)."""

    def ended(self, wait_s: float) -> bool:
        """Return whether no events follow; waits up to ``wait_s`` seconds for that."""


class LogPlace(NamedTuple):
    """A place in the event log."""

    offset: int = 0
    """Bytes before it."""
    rows: int = 0
    """Rows of figures before it."""


class Bookmark:
    """The place of the event log up to which a tracker has the figures for good: it has closed without an error.

    A process that is killed moves no bookmark: the next one repeats what followed it. Trackers take the later value of
    a repeated step, so that repeating is harmless and nothing is missing.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        file.seek(0)
        try:
            self.place = LogPlace(**json.loads(file.read() or "{}"))
        except (ValueError, TypeError):
            self.place = LogPlace()

    def move(self, place: LogPlace) -> None:
        """Write the bookmark."""
        self.place = place
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(place._asdict()) + "\n")
        self._file.flush()


@contextmanager
def bookmark(run_dir: Path, tracker: str) -> Iterator[Bookmark]:
    """Open a tracker's bookmark for one process at a time; raises TimeoutError while another one has it."""
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    with (run_dir / FOLDER / f"{tracker}.json").open("a+", encoding="utf-8") as file:
        _lock(file)
        yield Bookmark(file)


def _lock(file: IO[str]) -> None:
    give_up = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise TimeoutError(f"process {_holder(file)} follows this run for the same tracker") from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return


def _holder(file: IO[str]) -> str:
    """Return the id of the process that has locked a file, as far as the kernel says."""
    inode = f":{os.fstat(file.fileno()).st_ino} "
    try:
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "of another host"
    return next((line.split()[4] for line in lines if inode in line), "of another host")


def follow(tracker: Tracker, log: Path, place: LogPlace, ending: EndSignal, poll_s: float = _POLL_S) -> LogPlace:
    """Hand the events after ``place`` to the tracker until the log is complete; return the place behind the last."""
    offset, number = place
    while True:
        ended = ending.ended(poll_s)  # asked before the last look: events that are written before the end count
        for events, after in _chunks(log, offset):
            offset = after
            rows: list[FigureRow] = []
            for event in events:
                if event["kind"] == "start":
                    _send(tracker, rows)
                    rows = []
                    tracker.begin(event["data"].get("resumed_from") or 0)
                elif (row := row_of(event)) is not None:
                    rows.append(replace(row, number=number))
                    number += 1
            _send(tracker, rows)
        if ended:
            return LogPlace(offset, number)


def shows_more(log: Path, offset: int) -> bool:
    """Return whether a tracker shows anything of the events after ``offset``."""
    return any(event["kind"] == "start" or row_of(event) for events, _ in _chunks(log, offset) for event in events)


def last_exit_code(log: Path) -> int:
    """Return the exit code of rank 0 in the last attempt: 1 while it runs, or if it has ended without a word."""
    for event in reversed(last_events(log)):
        if event["kind"] == "end":
            return int(event["data"]["exit_code"])
        if event["kind"] == "start":
            break
    return EXIT_FAILED


def _chunks(log: Path, offset: int) -> Iterator[tuple[list[Event], int]]:
    while (chunk := read_new_events(log, offset, most_bytes=_CHUNK_BYTES))[1] != offset:
        offset = chunk[1]
        yield chunk


def _send(tracker: Tracker, rows: list[FigureRow]) -> None:
    if rows:
        tracker.log(rows)

"""A tracker's process: follows the event log of rank 0 until its starter says that the log is complete.

It is a process, not a thread of the rank: importing a tracker takes seconds of the interpreter, a hanging one is
killed, and what it does at exit (W&B waits there for its server) delays nobody. The event log is its queue: steps only
write the log, and a tracker that is slow or hangs falls behind and misses nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import cast

from partool.plan.event_log import event_log
from partool_runtime.trackers.follow import Bookmark, bookmark, follow, last_exit_code, shows_more
from partool_runtime.trackers.orders import Answers, Orders
from partool_runtime.trackers.types import TrackedRun, Tracker

_NICENESS = 10
"""Ranks go first: the process shares the cores of rank 0."""
_LONGEST = 300


def main() -> None:
    """Follow the run that standard input names; ends the process."""
    os.nice(_NICENESS)
    orders, answers = Orders(), Answers()
    if not (line := orders.first_line()):  # the starter ended meanwhile
        return
    run, code = TrackedRun.from_json(line), 0
    try:
        with bookmark(run.run_dir, run.tracker) as mark:
            _track(run, mark, orders, answers)
    except (Exception, SystemExit) as error:  # libraries of trackers raise whatever they like
        traceback.print_exc()
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        answers.give("problem", _without_keys(lines[0], run)[:_LONGEST])
        code = 1
    sys.stderr.flush()
    os._exit(code)  # handlers that trackers register for the exit may wait for their servers


def _track(run: TrackedRun, mark: Bookmark, orders: Orders, answers: Answers) -> None:
    log = event_log(run.run_dir, 0)
    if orders.ended(0.0) and not shows_more(log, mark.place.offset):
        return
    tracker = _open(run)
    if tracker.url:
        answers.give("url", _without_keys(tracker.url, run))
    place = follow(tracker, log, mark.place, orders)
    tracker.close(last_exit_code(log))
    mark.move(place)


def _open(run: TrackedRun) -> Tracker:
    module, _, name = run.adapter.partition(":")
    return cast(Tracker, getattr(importlib.import_module(module), name)(run))


def _without_keys(text: str, run: TrackedRun) -> str:
    """Return a text in which the values of the tracker's keys are masked."""
    for value in (os.environ.get(name) for name in run.keys):
        text = text.replace(value, "***") if value else text
    return text


if __name__ == "__main__":
    main()

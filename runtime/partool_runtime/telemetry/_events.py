"""Writer of a rank's event log: one ``write`` per line, so that a kill truncates at most the last line."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partool.plan.event_log import EVENT_VERSION, EventKind, event_log


class EventWriter:
    """Appends events to ``events/rank-N.jsonl``; after a truncated last line it continues on a new line.

    A full disk loses events, but does not end the run: the first failed write is reported on standard error, and later
    writes are still attempted.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = event_log(run_dir, rank)
        self._rank = rank
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = _ends_torn(self._fd)
        self._failed = False

    def write(self, kind: EventKind, data: Mapping[str, object]) -> None:
        """Append one event; non-finite numbers become null, as JSON has none."""
        event = {"v": EVENT_VERSION, "kind": kind, "t": round(time.time(), 6), "rank": self._rank, "data": data}
        try:
            text = json.dumps(event, allow_nan=False, default=str)
        except ValueError:
            text = json.dumps(_finite(event), allow_nan=False, default=str)
        line = (text + "\n").encode()
        try:
            written = os.write(self._fd, b"\n" + line if self._torn else line)
            self._torn = written < len(line) + self._torn
        except OSError as error:
            self._torn = True
            if not self._failed:
                print(f"partool: cannot write {self._path}: {error}", file=sys.stderr, flush=True)
            self._failed = True

    def close(self) -> None:
        """Close the file; calling again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

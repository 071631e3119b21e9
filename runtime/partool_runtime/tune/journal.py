"""Record on disk of the configurations timed so far, so that tuning can continue after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

from partool_kernels.registry import Config, Request
from partool_kernels.registry.source import source_hash

FILE = ".tune.jsonl"
"""Name of the file in the tables' folder, which is kept until all requests are measured."""
FAILED = float("inf")
_ATTEMPTS = 2


class Journal:
    """Seconds of each configuration of each request.

    A line is written before a configuration runs, and another line after. If only the first line exists, the process
    ended while the configuration ran; if that happens twice, the configuration is blamed and not run again.
    """

    def __init__(self, folder: Path) -> None:
        """Open the journal of a folder of tables, and read an earlier process's entries."""
        self._path = folder / FILE
        self._times: dict[str, float] = {}
        self._begun: Counter[str] = Counter()
        self._read()

    def _read(self) -> None:
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                key, seconds = json.loads(line)
                self._note(str(key), seconds if seconds is None else float(seconds))
            except (TypeError, ValueError):
                continue  # truncated when the process ended

    def cached_s(self, request: Request, config: Config) -> float | None:
        """Return the seconds of a configuration; :data:`FAILED` if it cannot run, None if it was not run."""
        return self._times.get(_key(request, config))

    def begin(self, request: Request, config: Config) -> None:
        """Record that a configuration is about to run."""
        self._write(_key(request, config), None)

    def end(self, request: Request, config: Config, seconds: float) -> None:
        """Record the time of a configuration."""
        self._write(_key(request, config), seconds)

    def _note(self, key: str, seconds: float | None) -> None:
        self._begun[key] += seconds is None
        if seconds is not None:
            self._times[key] = seconds
        elif self._begun[key] >= _ATTEMPTS:
            self._times[key] = FAILED

    def _write(self, key: str, seconds: float | None) -> None:
        self._note(key, seconds)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([key, seconds]))  # the line before may be truncated
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Remove the file, once all requests are measured."""
        self._path.unlink(missing_ok=True)


def _key(request: Request, config: Config) -> str:
    what = repr((request, config, source_hash(request.kernel)))
    return hashlib.sha256(what.encode()).hexdigest()[:24]

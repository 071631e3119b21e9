"""What has been timed so far, on disk, so that tuning goes on after it was ended."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

from partool_kernels.registry import Config, Request
from partool_kernels.registry.source import source_hash

FILE = ".tune.jsonl"
"""In the folder of the tables, until all is measured."""
FAILED = float("inf")
_ATTEMPTS = 2


class Journal:
    """Seconds of each configuration of each request.

    A line is written before a configuration is run and one after. Where only the first is there the process was ended
    meanwhile; after the second time the configuration is held to have done it, and is not run again.
    """

    def __init__(self, folder: Path) -> None:
        """Take the journal of a folder of tables, and read what an earlier process left."""
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
                continue  # torn when the process ended

    def known(self, request: Request, config: Config) -> float | None:
        """Return the seconds of a configuration, :data:`FAILED` where it cannot run, None where it was not run."""
        return self._times.get(_key(request, config))

    def begin(self, request: Request, config: Config) -> None:
        """Note that a configuration is going to be run."""
        self._write(_key(request, config), None)

    def end(self, request: Request, config: Config, seconds: float) -> None:
        """Note how long it took."""
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
            file.write("\n" + json.dumps([key, seconds]))  # the line before may be torn
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Remove it: nothing is left to do."""
        self._path.unlink(missing_ok=True)


def _key(request: Request, config: Config) -> str:
    what = repr((request, config, source_hash(request.kernel)))
    return hashlib.sha256(what.encode()).hexdigest()[:24]

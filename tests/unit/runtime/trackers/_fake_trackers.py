"""Trackers that write a file, raise, or never return, for a process that the tests start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

from partool_runtime.trackers.types import FigureRow, TrackedRun

_FOREVER_S = 600.0


class Writes:
    """Appends what it is given to ``told`` of the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        self.url = f"https://example.com/{run.run_id}"
        self._file = (run.run_dir / "told").open("a", buffering=1)

    def begin(self, step: int) -> None:
        self._file.write(json.dumps({"begin": step}) + "\n")

    def log(self, rows: Sequence[FigureRow]) -> None:
        for row in rows:
            self._file.write(json.dumps({"step": row.step, **row.figures}) + "\n")

    def close(self, exit_code: int) -> None:
        self._file.write(json.dumps({"close": exit_code}) + "\n")


class Raises(Writes):
    def log(self, rows: Sequence[FigureRow]) -> None:
        raise RuntimeError("the key feedface is wrong\nmore")


class HangsInOpen(Writes):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        time.sleep(_FOREVER_S)


class HangsInLog(Writes):
    def log(self, rows: Sequence[FigureRow]) -> None:
        time.sleep(_FOREVER_S)


class HangsInClose(Writes):
    """Leaves a process of its own behind, too, whose id it writes."""

    def close(self, exit_code: int) -> None:
        child = subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({_FOREVER_S})"])
        self._file.write(json.dumps({"child": child.pid}) + "\n")
        time.sleep(_FOREVER_S)

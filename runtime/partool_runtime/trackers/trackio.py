"""trackio: an SQLite file, or the server or Space that its environment variables name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from partool_runtime.trackers.types import FigureRow, TrackedRun


class TrackioTracker:
    """A run of trackio, which knows runs by their names: the name holds the run's id."""

    def __init__(self, run: TrackedRun) -> None:
        if run.uri is not None:
            os.environ["TRACKIO_DIR"] = run.uri  # read as trackio is imported
        import trackio

        name = run.run_id if run.name == run.run_id else f"{run.name} {run.run_id}"
        config = run.flat_config | ({"tags": ", ".join(run.tags)} if run.tags else {})
        self.url = ""
        self._run: Any = trackio.init(
            project=run.project,
            name=name,
            group=run.group,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def begin(self, step: int) -> None:
        """Do nothing: of a repeated step the later row counts."""

    def log(self, rows: Sequence[FigureRow]) -> None:
        """Send a row per step."""
        for row in rows:
            self._run.log(dict(row.figures), step=row.step)

    def close(self, exit_code: int) -> None:
        """Send the last rows; trackio knows no state of a run."""
        self._run.finish()

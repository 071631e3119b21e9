"""TensorBoard: event files, which need no server.

The writer is TensorBoard's own, which torch's ``SummaryWriter`` wraps, too: this process needs no torch, and points get
the time at which they happened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from partool_runtime.trackers.types import FigureRow, TrackedRun

_QUEUE, _FLUSH_S = 20, 30


class TensorBoardTracker:
    """Writes scalars as float32 into ``uri``, by default ``tensorboard/`` of the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.run_dir / "tensorboard" if run.uri is None else f"{run.uri}/{run.run_id}"
        self.url = str(folder)
        self._event, self._summary = event_pb2, summary_pb2
        self._writer: Any = EventFileWriter(str(folder), _QUEUE, _FLUSH_S)
        about = {"name": run.name, "project": run.project, "group": run.group, "tags": run.tags, "config": run.config}
        value = summary_pb2.Summary.Value(
            tag="run",
            metadata=metadata.create_summary_metadata("run", "what this run is"),
            tensor=tensor_pb2.TensorProto(
                dtype="DT_STRING",
                string_val=[f"```\n{json.dumps(about, indent=2)}\n```".encode()],
                tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]),
            ),
        )
        self._writer.add_event(event_pb2.Event(summary=summary_pb2.Summary(value=[value])))

    def begin(self, step: int) -> None:
        """Have readers forget what earlier attempts have written of the steps after ``step``."""
        log = self._event.SessionLog
        self._writer.add_event(self._event.Event(step=step + 1, session_log=log(status=log.START)))

    def log(self, rows: Sequence[FigureRow]) -> None:
        """Write a point per figure."""
        for row in rows:
            values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in row.figures.items()]
            summary = self._summary.Summary(value=values)
            self._writer.add_event(self._event.Event(step=row.step, wall_time=row.at, summary=summary))

    def close(self, exit_code: int) -> None:
        """Flush and close the file."""
        self._writer.close()

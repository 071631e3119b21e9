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
        self._event, self._summary, self._metadata = event_pb2, summary_pb2, metadata
        self._tensor, self._shape = tensor_pb2.TensorProto, tensor_shape_pb2.TensorShapeProto
        self._writer: Any = EventFileWriter(str(folder), _QUEUE, _FLUSH_S)
        about = {"name": run.name, "project": run.project, "group": run.group, "tags": run.tags, "config": run.config}
        value = self._text("run", "what this run is", f"```\n{json.dumps(about, indent=2)}\n```")
        self._writer.add_event(event_pb2.Event(summary=summary_pb2.Summary(value=[value])))

    def _text(self, tag: str, description: str, text: str) -> Any:
        """Return the summary of a text, which TensorBoard shows as Markdown."""
        return self._summary.Summary.Value(
            tag=tag,
            metadata=self._metadata.create_summary_metadata(tag, description),
            tensor=self._tensor(
                dtype="DT_STRING",
                string_val=[text.encode()],
                tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
            ),
        )

    def begin(self, step: int) -> None:
        """Have readers forget what earlier attempts have written of the steps after ``step``."""
        log = self._event.SessionLog
        self._writer.add_event(self._event.Event(step=step + 1, session_log=log(status=log.START)))

    def log(self, rows: Sequence[FigureRow]) -> None:
        """Write a point per figure, and a text per prompt."""
        for row in rows:
            values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in row.figures.items()]
            for number, (prompt, text) in enumerate(row.texts, 1):
                shown = f"```\n{prompt}\n```\n\n```\n{text}\n```"
                values.append(self._text(f"samples/{number}", "a prompt, and what the model adds", shown))
            summary = self._summary.Summary(value=values)
            self._writer.add_event(self._event.Event(step=row.step, wall_time=row.at, summary=summary))

    def close(self, exit_code: int) -> None:
        """Flush and close the file."""
        self._writer.close()

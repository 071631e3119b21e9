"""Prompts and what the model adds, at the trackers that show text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from partool_runtime.trackers.mlflow import MlflowTracker
from partool_runtime.trackers.tensorboard import TensorBoardTracker
from partool_runtime.trackers.types import FigureRow, TrackedRun
from partool_runtime.trackers.wandb import WandbTracker

ROW = FigureRow(3, 1.5, {"validation/loss": 2.0}, (("a cat", "sat"), ("é", "on")), 7)


def test_tensorboard_has_a_text_for_each_prompt(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = TrackedRun("tensorboard", "", "id", tmp_path, "name", "project", None, (), {"a": 1}, None)
    tracker = TensorBoardTracker(run)
    tracker.log([ROW])
    tracker.close(0)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {"run", "samples/1", "samples/2"} <= set(read.Tags()["tensors"])
    (event,) = read.Tensors("samples/2")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (3, "```\né\n```\n\n```\non\n```")
    assert [point.value for point in read.Scalars("validation/loss")] == [2.0]


def test_wandb_has_a_table_and_mlflow_a_file_per_step() -> None:
    sent: list[Any] = []
    wandb: Any = WandbTracker.__new__(WandbTracker)
    wandb._run = SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    wandb._table = lambda columns, data: (columns, data)
    wandb.log([ROW])
    ((number, values),) = sent
    assert (number, values["samples"]) == (7, (["prompt", "text"], [["a cat", "sat"], ["é", "on"]]))
    files: list[Any] = []
    mlflow: Any = MlflowTracker.__new__(MlflowTracker)
    mlflow._run_id, mlflow._metric = "run", lambda *of: of
    mlflow._client = SimpleNamespace(
        log_batch=lambda run, metrics: None, log_text=lambda run, text, file: files.append((run, text, file))
    )
    mlflow.log([ROW])
    assert files == [("run", "# a cat\nsat\n\n# é\non\n", "samples/step-00000003.txt")]

"""Experiment trackers that can follow a run, one record each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrackerRecord:
    """A tracker. Its name in specs is also the name of partool's extra that installs it."""

    title: str
    package: str
    """Package that must be importable where rank 0 runs."""
    run: str
    """``module:Class`` of the adapter; the module is imported only in the tracker's own process."""
    uri: str
    """What ``uri`` names, in words."""
    uri_begins: tuple[str, ...] = ()
    """Beginnings of ``uri``; empty where ``uri`` is a folder."""
    keys: tuple[str, ...] = ()
    """Environment variables with secrets that the package reads."""


TRACKERS: dict[str, TrackerRecord] = {
    "wandb": TrackerRecord(
        "Weights & Biases",
        "wandb",
        "partool_runtime.trackers.wandb:WandbTracker",
        "the address of a server, as WANDB_BASE_URL",
        ("https://", "http://"),
        ("WANDB_API_KEY",),
    ),
    "mlflow": TrackerRecord(
        "MLflow",
        "mlflow",
        "partool_runtime.trackers.mlflow:MlflowTracker",
        "a database or a server, as MLFLOW_TRACKING_URI; MLflow stores no longer in plain folders",
        ("sqlite:///", "https://", "http://", "postgresql", "mysql", "mssql", "databricks"),
        ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DATABRICKS_TOKEN"),
    ),
    "trackio": TrackerRecord(
        "trackio",
        "trackio",
        "partool_runtime.trackers.trackio:TrackioTracker",
        "the folder of its database, as TRACKIO_DIR",
        keys=("HF_TOKEN",),
    ),
    "tensorboard": TrackerRecord(
        "TensorBoard",
        "tensorboard",
        "partool_runtime.trackers.tensorboard:TensorBoardTracker",
        "the folder of its event files",
    ),
}
"""Name of a tracker in specs → facts about the tracker."""

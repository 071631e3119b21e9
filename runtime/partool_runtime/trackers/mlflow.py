"""MLflow: a database of its own, by default an SQLite file beside the runs, or a server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from partool_runtime.trackers.types import FigureRow, TrackedRun

_RUN_TAG = "partool.run"
"""Tag with partool's run id: MLflow makes run ids itself."""
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""Largest batches that MLflow's API takes (mlflow.utils.validation)."""
_LONGEST = 500
"""Characters of a parameter that every version of MLflow's servers stores."""
_STATES = {0: "FINISHED", 75: "KILLED"}


class MlflowTracker:
    """A run of MLflow. Attempts after the first continue it; a setting that they change becomes a tag."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.url = run.uri or os.environ.get("MLFLOW_TRACKING_URI") or _beside(run)
        self._metric, self._param = Metric, Param
        self._client: Any = MlflowClient(tracking_uri=self.url)
        self._run_id = self._continued(run)
        self._set_config(run)

    def _continued(self, run: TrackedRun) -> str:
        """Return the id of the run that has partool's id as a tag, made now if there is none."""
        client = self._client
        experiment = client.get_experiment_by_name(run.project)
        if experiment is None:
            artifacts = (run.run_dir / "mlflow").as_uri() if self.url.startswith("sqlite") else None
            id = client.create_experiment(run.project, artifact_location=artifacts)
        else:
            id = experiment.experiment_id
        tags = {_RUN_TAG: run.run_id, **({"group": run.group} if run.group else {}), **dict.fromkeys(run.tags, "true")}
        same = client.search_runs([id], f"tags.`{_RUN_TAG}` = '{run.run_id}'", max_results=1)
        if not same:
            return str(client.create_run(id, tags=tags, run_name=run.name).info.run_id)
        run_id = str(same[0].info.run_id)
        client.update_run(run_id, status="RUNNING", name=run.name)
        for name, value in tags.items():
            client.set_tag(run_id, name, value)
        return run_id

    def _set_config(self, run: TrackedRun) -> None:
        before = self._client.get_run(self._run_id).data.params
        config = {name: str(value)[:_LONGEST] for name, value in run.flat_config.items()}
        fresh = [self._param(name, value) for name, value in config.items() if name not in before]
        for start in range(0, len(fresh), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=fresh[start : start + _MOST_PARAMS])
        for name, value in config.items():
            if before.get(name, value) != value:  # parameters never change
                self._client.set_tag(self._run_id, name, value)

    def begin(self, step: int) -> None:
        """Do nothing: of a repeated step MLflow takes the value with the later time."""

    def log(self, rows: Sequence[FigureRow]) -> None:
        """Send the figures in batches, and the texts of a step as an artifact."""
        metrics = list(self._metrics(rows))
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

        for row in rows:
            if row.texts:
                content = "\n\n".join(f"# {prompt}\n{text}" for prompt, text in row.texts)
                self._client.log_text(self._run_id, content + "\n", f"samples/step-{row.step:08d}.txt")

    def _metrics(self, rows: Sequence[FigureRow]) -> Iterator[Any]:
        for row in rows:
            for name, value in row.figures.items():
                yield self._metric(name, value, int(row.at * 1000), row.step)

    def close(self, exit_code: int) -> None:
        """Set the run's state."""
        self._client.set_terminated(self._run_id, _STATES.get(exit_code, "FAILED"))


def _beside(run: TrackedRun) -> str:
    """Return the address of the database of all runs of a store; of a run elsewhere, of one in its folder."""
    in_store = run.run_dir.parent.name == "runs"
    return f"sqlite:///{run.run_dir.parent.parent if in_store else run.run_dir}/mlflow.db"

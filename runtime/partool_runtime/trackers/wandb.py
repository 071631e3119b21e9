"""Weights & Biases, also without a network (``WANDB_MODE=offline``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from partool_runtime.trackers.types import FigureRow, TrackedRun

STEP = "step"
"""The figure that W&B draws the others over. W&B's own step may only grow: it would drop what an attempt repeats. That
step is the row's number, which also grows where attempts are recorded offline, apart from each other."""


class WandbTracker:
    """A run of W&B; files lie in ``wandb/`` of the run's folder unless ``WANDB_DIR`` says otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        if run.uri is not None:
            os.environ["WANDB_BASE_URL"] = run.uri
        # Text, machine and packages of this process say nothing about the training.
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_save_requirements=False
        )
        self._table: Any = wandb.Table
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            dir=os.environ.get("WANDB_DIR", str(run.run_dir)),
            id=run.run_id,
            resume="allow",
            name=run.name,
            group=run.group,
            tags=list(run.tags),
            config=dict(run.config),
            settings=settings,
            allow_val_change=True,
        )
        self.url = self._run.url or ""
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def begin(self, step: int) -> None:
        """Do nothing: each row has its step."""

    def log(self, rows: Sequence[FigureRow]) -> None:
        """Send a row of history per step, with prompts and texts as a table."""
        for row in rows:
            texts = (
                {"samples": self._table(["prompt", "text"], data=[list(pair) for pair in row.texts])}
                if row.texts
                else {}
            )
            self._run.log({STEP: row.step, "_timestamp": row.at, **row.figures, **texts}, step=row.number)

    def close(self, exit_code: int) -> None:
        """End this attempt; W&B shows the exit code."""
        self._run.finish(exit_code=exit_code)

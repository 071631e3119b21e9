"""Evaluations on ranks of a pool: each opens and closes a process group of its own."""

from __future__ import annotations

from pathlib import Path

import layouts  # noqa: F401 - a helper of the models, which is no part of what users allow
from _ranks import forget_meshes
from _trainer_worker import StopAt

from partool.plan.types import Plan
from partool_runtime.jobs.evaluate.job import evaluate
from partool_runtime.mesh import close_ranks


def evaluate_plan(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    """Evaluate as one rank; return ``done``, or the exception that ended the run."""
    forget_meshes()
    try:
        evaluate(Plan.model_validate_json(plan_json), run_dir, resume, StopAt(stop_at))
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        if "Preempted" not in ended:
            close_ranks()
        return ended
    return "done"

"""Ranks of test_tasks.py: scores of rows, and tasks whose process is a stand-in, in each layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _evaluation_worker import evaluate_plan
from _ranks import forget_meshes
from _trainer_worker import StopAt, train_plan

from partool.plan.task_results import TaskResult
from partool.plan.types import Plan
from partool_runtime.jobs.tasks import TaskRunner, task_batches
from partool_runtime.mesh import close_ranks, open_ranks
from partool_runtime.preparation import prepare
from partool_runtime.tasks import beside
from partool_runtime.tasks.messages import Windows
from partool_runtime.weights import fill, post_load


def score(plan_json: str, rows: list[list[int]], scored: list[int]) -> list[list[float]]:
    """Return of each row its log-likelihood, and the number of labels that are not the model's first choice."""
    forget_meshes()
    plan = Plan.model_validate_json(plan_json)
    ranks = open_ranks(plan)
    prepared = prepare(plan, ranks, lambda timed, sent: None)
    fill(prepared.model, plan.weights, seed=plan.training.seed, group=ranks.world)
    post_load(prepared.model)
    assert prepared.scoring is not None
    batches = task_batches(plan, ranks, Windows.of(rows, scored))
    sums = prepared.scoring.rows(batches, len(rows), lambda: False)
    prepared.passes.close()
    prepared.memory.close()
    close_ranks(ranks)
    assert sums is not None
    return [[float(number) for number in row] for row in np.asarray(sums)]


def train_judged(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    """Train as one rank beside the stand-in; a stop reaches the last rank once the tasks of step ``stop_at`` run."""
    _stand_in()
    stop, last = StopAt(-1), int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    evaluate = TaskRunner.evaluate

    def stopped(self: TaskRunner, step: int, stopping: Callable[[], bool]) -> dict[str, TaskResult] | None:
        if step == stop_at and last:
            stop.signalled()
        return evaluate(self, step, stopping)

    TaskRunner.evaluate = stopped  # type: ignore[method-assign]
    try:
        return train_plan(plan_json, run_dir, resume, stop)
    finally:
        TaskRunner.evaluate = evaluate  # type: ignore[method-assign]


def judge_plan(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    """Evaluate as one rank; the process of the tasks is the stand-in ``_tasks_process``."""
    _stand_in()
    return evaluate_plan(plan_json, run_dir, resume, stop_at)


def _stand_in() -> None:
    beside.MODULE = "_tasks_process"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])

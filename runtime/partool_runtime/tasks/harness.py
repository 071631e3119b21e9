"""A run of tasks by lm-evaluation-harness, as its ``simple_evaluate`` prepares one for a model that is given.

``simple_evaluate`` describes the machine in each result, by commands that take seconds; no argument prevents that. The
seeds, and the rule about examples, are those of version 0.4.13. Only the process of the tasks imports this module.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from lm_eval.evaluator import evaluate

from partool_runtime.tasks.messages import TaskSettings

_PYTHON_SEED, _SEED = 0, 1234
"""Defaults of ``simple_evaluate``: of Python's generator; of numpy's, of torch's and of examples."""


def results_of(model: Any, manager: Any, settings: TaskSettings) -> dict[str, Any]:
    """Return what lm_eval's ``evaluate`` returns for the tasks of ``settings``, which ``manager`` loads."""
    random.seed(_PYTHON_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    loaded = manager.load(list(settings.tasks))
    for task in loaded["tasks"].values():
        _set_examples(task, settings.num_fewshot)
    results: dict[str, Any] = evaluate(lm=model, task_dict=loaded, limit=settings.limit, log_samples=False)
    return results


def _set_examples(task: Any, count: int | None) -> None:
    """Give a task its number of examples: its own 0 stays 0, and a task without a number has none by default."""
    of_task = task.get_config("num_fewshot")
    if count is not None and of_task != 0:
        task.set_config(key="num_fewshot", value=count)
    elif of_task is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_SEED)

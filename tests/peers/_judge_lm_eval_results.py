"""Results of lm-evaluation-harness for scores that are made up, by its ``simple_evaluate`` and by partool: OUT TASK...

Both are asked for with each task's examples, and with two.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from partool_runtime.tasks.harness import results_of
from partool_runtime.tasks.messages import Scores, TaskSettings, Windows
from partool_runtime.tasks.model import RankModel
from partool_runtime.tasks.tokens import open_tokens

LENGTH, LIMIT = 200, 9


def made_up(windows: Windows) -> Scores:
    """Return scores that depend on a row's tokens and on nothing else."""
    ends = np.cumsum(windows.lengths_R2[:, 0])
    rows = [windows.tokens[end - count : end] for end, (count, _) in zip(ends, windows.lengths_R2, strict=True)]
    sums = np.array([float(np.sin(row * np.arange(1, len(row) + 1)).sum()) for row in rows])
    return Scores(-np.abs(sums), sums > 0)


def asked(tasks: list[str]) -> dict[str, Any]:
    settings = TaskSettings(tuple(tasks), None, LIMIT, None, "bytes", (), LENGTH)
    model, manager = RankModel(open_tokens("bytes", ()), LENGTH, made_up), TaskManager(include_defaults=False)
    out: dict[str, Any] = {}
    for examples in (None, 2):
        common = {"model": model, "tasks": tasks, "task_manager": manager, "limit": LIMIT, "num_fewshot": examples}
        began = time.perf_counter()
        theirs = simple_evaluate(**common, log_samples=False)
        between = time.perf_counter()
        ours = results_of(model, manager, replace(settings, num_fewshot=examples))
        seconds = [between - began, time.perf_counter() - between]
        of_both = [{key: each.get(key) for key in ("results", "groups", "n-samples")} for each in (theirs, ours)]
        out[str(examples)] = {"theirs": of_both[0], "ours": of_both[1], "seconds": seconds}
    return out


if __name__ == "__main__":
    out, *tasks = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as file:
        json.dump(asked(tasks), file, default=str)

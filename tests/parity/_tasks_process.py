"""A process of tasks without lm_eval: it has two lists of rows scored, and gives their sums as metrics.

The task ``unknown`` cannot be loaded; ``breaks`` fails the second time that the tasks run.
"""

from __future__ import annotations

import os
import sys
import time

from partool_runtime.frames import read_frame, write_frame
from partool_runtime.tasks.messages import Scores, TaskSettings, Windows, message

ROWS = [[5, 7, 11, 13, 2, 3], [9, 4, 8, 8], [3, 1, 2], [6, 250]]
SCORED = [3, 1, 2, 1]


def serve() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    settings = TaskSettings.from_json(read_frame(source)[0])
    if "unknown" in settings.tasks:
        write_frame(sink, message("error", error=["PT539", "the task unknown cannot be loaded", "name another"]))
        return
    write_frame(sink, message("ready"))
    runs = 0
    while read_frame(source):
        runs += 1
        if "breaks" in settings.tasks and runs > 1:
            write_frame(sink, message("error", error=["PT641", "the task breaks", ""]))
            return
        totals = []
        for rows in (slice(0, 4), slice(0, 1)):
            time.sleep(0.01)
            write_frame(sink, *Windows.of(ROWS[rows], SCORED[rows]).parts())
            scores = Scores.from_parts(read_frame(source))
            totals.append([float(scores.log_likelihoods.sum()), float(scores.greedy.mean())])
        metrics = {"sum": {"value": totals[0][0], "stderr": 0.5}, "first": {"value": totals[1][0], "stderr": None}}
        metrics["nothing"] = {"value": float("nan"), "stderr": None}
        requests = [{"task": "squares", "document": 0, "request": 0, "log_likelihood": totals[1][0], "greedy": False}]
        write_frame(sink, message("result", tasks={"squares": {"documents": 4, "metrics": metrics}}, requests=requests))


if __name__ == "__main__":
    serve()

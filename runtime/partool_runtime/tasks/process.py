"""The process of the tasks beside rank 0: loads them, hands rows to the ranks and computes metrics from the scores.

It is a process of its own so that seeds, threads and memory of lm-evaluation-harness are not those of a training.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from typing import IO, Any

from partool.spec.evaluation import is_file
from partool_runtime.errors import ConfigurationError
from partool_runtime.frames import read_frame, write_frame
from partool_runtime.tasks.messages import Scores, TaskSettings, Windows, head_of, message
from partool_runtime.tasks.tokens import open_tokens

_GENERATES = "generate_until"


def serve() -> None:
    """Answer frames on standard input until it ends: the settings, then each time ``evaluate``.

    What libraries print goes to standard error.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        settings = TaskSettings.from_json(read_frame(source)[0])
        runner = _Runner(settings, source, sink)
        write_frame(sink, message("ready"))
        while read_frame(source):
            write_frame(sink, message("result", **runner.evaluate()))
    except ConfigurationError as error:
        write_frame(sink, message("error", error=[error.code, error.message, error.help]))
    except BrokenPipeError:  # rank 0 has ended
        return
    except Exception as error:  # of lm_eval, of a task's own code, or of its data
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}"
        write_frame(sink, message("error", error=["PT641", f"the tasks failed: {words}", "their log has all of it"]))


class _Runner:
    """The tasks, and the model that they ask."""

    def __init__(self, settings: TaskSettings, source: IO[bytes], sink: IO[bytes]) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            message = "evaluation.tasks needs the package lm_eval, which is not installed where rank 0 runs"
            raise ConfigurationError("PT538", message, "pip install 'partool[eval]'")
        from partool_runtime.tasks.model import RankModel

        self._settings, self._source, self._sink = settings, source, sink
        tokens = open_tokens(settings.tokenizer, settings.special_tokens)
        self._model = RankModel(tokens, settings.sequence_length, self._ask)
        self._manager = _manager(settings)
        self._check()

    def evaluate(self) -> dict[str, Any]:
        """Run the tasks; return their metrics, and the log-likelihood of each request."""
        from partool_runtime.tasks.harness import results_of

        self._model.requests.clear()
        results = results_of(self._model, self._manager, self._settings)
        counts = {name: int(each["effective"]) for name, each in (results.get("n-samples") or {}).items()}
        rows = {**(results.get("groups") or {}), **results["results"]}
        tasks = {name: {"documents": counts.get(name), "metrics": metrics_of(row)} for name, row in rows.items()}
        return {"tasks": tasks, "requests": self._model.requests}

    def _check(self) -> None:
        """Load the tasks once; raises ConfigurationError PT539, PT639."""
        from partool_runtime.tasks.model import generation_error

        for name in self._settings.tasks:
            try:
                loaded = self._manager.load([name])
            except Exception as error:  # KeyError, and whatever data sets and YAML raise
                traceback.print_exc()
                words = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
                help = "name a task that lm_eval has, or its YAML file, whose data are here; evaluation.include_path"
                message = f"the task {name} cannot be loaded: {type(error).__name__}: {words}"
                raise ConfigurationError("PT539", message, help) from error
            for task_name, task in loaded["tasks"].items():
                if task.OUTPUT_TYPE == _GENERATES:
                    raise generation_error(task_name)

    def _ask(self, windows: Windows) -> Scores:
        write_frame(self._sink, *windows.parts())
        parts = read_frame(self._source)
        if not parts or head_of(parts)["kind"] != "scores":
            raise BrokenPipeError
        return Scores.from_parts(parts)


def _manager(settings: TaskSettings) -> Any:
    """Return lm_eval's index of tasks, with its own ones only where they are asked for: reading them takes seconds."""
    from lm_eval.tasks import TaskManager

    folder = settings.include_path
    manager = TaskManager(include_path=folder, include_defaults=False)
    if all(is_file(name) or name in manager.all_tasks for name in settings.tasks):
        return manager
    return TaskManager(include_path=folder, include_defaults=True)


def metrics_of(row: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the metrics in a row of lm_eval's results, each with its standard error; None where there is none.

    The filter belongs to a metric's name unless it is ``none``.
    """
    metrics = {}
    for key, value in row.items():
        name, comma, of_filter = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = row.get(f"{name}_stderr,{of_filter}")
        full = name if of_filter == "none" else key
        metrics[full] = {"value": float(value), "stderr": float(error) if isinstance(error, int | float) else None}
    return metrics


if __name__ == "__main__":
    serve()

"""The ``evaluation`` section: tasks of lm-evaluation-harness by which a model is judged."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from partool.spec._base import Section
from partool.spec.numbers import Times
from partool.spec.patterns import FilePath

TaskName = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", min_length=1, max_length=4096)]
_Shots = Annotated[int, Field(ge=0, le=10_000)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def is_file(task: str) -> bool:
    """Return whether a task is named by the path of its file."""
    return task.endswith((".yaml", ".yml"))


class EvaluationSpec(Section):
    """Tasks of lm-evaluation-harness, which ask for log-likelihoods of texts (docs/guide/evaluation.md)."""

    tasks: Annotated[list[TaskName], BeforeValidator(_listed, json_schema_input_type=TaskName | list[TaskName])] = []
    """Names of tasks, groups or tags, or paths of their YAML files; ``job: evaluate`` then runs these in place of the
    loss over the data."""
    include_path: FilePath | None = None
    """Folder with YAML files of further tasks."""
    limit: Times | None = None
    """Documents of each task, the first ones; default: all."""
    num_fewshot: _Shots | None = None
    """Solved examples before each question; default: what the task says."""
    every: Times = 1
    """job: train: validations from one run of the tasks to the next; the last validation always has one."""

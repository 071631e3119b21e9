"""The ``evaluation`` section: absolute paths, files that are missing, texts that the model's tokens do not spell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.planner.rules.data import lies
from partool.spec.evaluation import EvaluationSpec, is_file
from partool.spec.launch import LaunchSpec
from partool.spec.spec import Spec

_BYTES_VOCAB = 256
_ROOM = 1024
"""A vocabulary of at most so many tokens may be that of bytes, made a little larger."""


def resolve_evaluation(evaluation: EvaluationSpec, base_dir: Path) -> EvaluationSpec:
    """Return the section with absolute paths; relative ones start from ``base_dir``, the spec's folder."""
    folder = evaluation.include_path
    tasks = [str(base_dir / task) if is_file(task) else task for task in evaluation.tasks]
    update = {"tasks": tasks, "include_path": None if folder is None else str(base_dir / folder)}
    return evaluation.model_copy(update=update)


def check_files(spec: Spec, launch: LaunchSpec, base_dir: Path) -> Iterator[Diagnostic]:
    """Yield findings about files of tasks, and a folder of them, that are not on this machine."""
    evaluation, resolved = spec.evaluation, resolve_evaluation(spec.evaluation, base_dir)
    paths: list[tuple[tuple[str | int, ...], str]] = [
        (("evaluation", "tasks", index), task)
        for index, task in enumerate(resolved.tasks)
        if is_file(task) and not os.path.isfile(task)
    ]
    if resolved.include_path is not None and not os.path.isdir(resolved.include_path):
        paths.append((("evaluation", "include_path"), resolved.include_path))
    for place, path in paths if evaluation.tasks else ():
        severity, where = lies(spec, launch, path)
        what = "folder" if place[-1] == "include_path" else "file"
        help = "write the name of a task, or the path of its YAML file; paths start from the spec's folder"
        yield Diagnostic("PT418", f"there is no {what} {path}{where}", severity, place, help=help)


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about tasks that another engine would not run, and about a tokenizer that is not the model's."""
    spec = problem.spec
    if not spec.evaluation.tasks:
        return
    if spec.engine != "partool":
        message = f"engine: {spec.engine} is only planned; partool itself runs tasks"
        yield Diagnostic("PT416", message, path=("evaluation",), help="drop evaluation, or write engine: partool")
    vocab = problem.model.vocab
    if spec.data.tokenizer == "bytes" and vocab > _ROOM:
        message = f"tasks are texts, data.tokenizer is bytes, and the model has {vocab:,} tokens and not {_BYTES_VOCAB}"
        help = "name the folder of the model's tokenizer: data: {tokenizer: FOLDER}"
        yield Diagnostic("PT419", message, "warning", ("data", "tokenizer"), help=help)


def sentences(problem: Problem) -> list[str]:
    """Return what a plan says of the time of its tasks."""
    spec = problem.spec
    if not spec.evaluation.tasks:
        return []
    when = "" if not problem.job.backward else f" Tasks run with {_share(spec.evaluation.every)}."
    return [
        f"Tasks {', '.join(Path(task).stem if is_file(task) else task for task in spec.evaluation.tasks)}: how many "
        "requests they make is known once a run has loaded them, so their time is in no total. A step's forward time "
        f"is that of {spec.training.global_batch:,} requests of at most {spec.training.sequence_length:,} tokens.{when}"
    ]


def _share(every: int) -> str:
    return "each validation" if every == 1 else f"one validation in {every:,}, and with the last one"

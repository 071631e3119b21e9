"""``partool eval``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from partool.cli._eval import Judged, judged_or_exit
from partool.cli._load import TrustCode
from partool.cli._local import LocalOptions, launch
from partool.cli._runs import reading_records
from partool.launch.evaluating import TasksOption
from partool.launch.store import RunStore
from partool.plan.evaluation_result import read_result
from partool.plan.terminal import say


def command(
    target: Annotated[
        str,
        typer.Argument(help="Run (id, name, last), folder of a checkpoint (step-...), or folder of transformers'."),
    ] = "last",
    *,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", help="Tasks of lm_eval, or their YAML files: a,b; default: the loss over the data."),
    ] = None,
    include_path: Annotated[Path | None, typer.Option("--include-path", help="Folder with files of tasks.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Documents of each task, at most.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Solved examples before each question.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint of a run; default the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint of the run's best validation.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, print what would run, and run nothing.")] = False,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the result.")] = "text",
    trust_code: TrustCode = False,
) -> None:
    """Judge a model on this machine: the loss over held-out data, or tasks of lm-evaluation-harness."""
    if best and step is not None:
        raise typer.BadParameter("--best and --step each name a checkpoint: give one of them")
    names = tuple(name for each in tasks or () for name in each.split(",") if name)
    for option, value in (("--include-path", include_path), ("--limit", limit), ("--num-fewshot", num_fewshot)):
        if value is not None and not names:
            raise typer.BadParameter(f"{option} is about tasks: give --tasks")
    asked = TasksOption(names, include_path, limit, num_fewshot)
    judged = judged_or_exit(target, asked, overrides or [], step=step, best=best)
    if output == "text":
        launch(judged.plan, judged.spec_text, None, LocalOptions(dry_run=dry_run))
        return
    _launch_for_json(judged, dry_run=dry_run)


def _launch_for_json(judged: Judged, *, dry_run: bool) -> None:
    """Launch with all output of ranks on stderr, then print the result as JSON; ends the command on a failure."""
    before = {run.id for run in RunStore().runs()}
    code: Any = 0
    with _stdout_to_stderr():
        try:
            launch(judged.plan, judged.spec_text, None, LocalOptions(dry_run=dry_run))
        except typer.Exit as ended:
            code = ended.exit_code
    if code or dry_run:
        raise typer.Exit(code)
    run = next(each for each in RunStore().runs() if each.id not in before)
    with reading_records():
        result = read_result(run.path)
    say(json.dumps({"run": run.id, **(result.model_dump(mode="json") if result is not None else {})}, indent=2))


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what this process and its children write to standard output to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

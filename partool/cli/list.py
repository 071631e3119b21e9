"""``partool list``."""

from __future__ import annotations

import json
import time
from typing import Annotated, Literal

import typer

from partool.launch.describe import as_json, display, step_age
from partool.launch.store import RunStore
from partool.launch.targets import statuses
from partool.plan.terminal import say
from partool.spec.numbers import duration


def command(
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
) -> None:
    """List the runs, the newest first, wherever they run."""
    store = RunStore()
    runs = store.runs()
    by_id = statuses(runs)
    if output == "json":
        say(json.dumps([as_json(run, by_id[run.id]) for run in runs], indent=2))
        return
    if not runs:
        say(f"partool: there are no runs in {display(store.root)}; partool launch SPEC starts one", err=True)
        return
    width = max((len(run.id) for run in runs), default=0)
    for run in runs:
        status = by_id[run.id]
        age = duration(time.time() - status.created) + " ago" if status.created else ""
        reason = ("" if status.reason == status.state else status.reason) or step_age(run, status)
        say(f"{run.id:<{width}}  {status.state:<9}  {age:<14}  {reason}".rstrip())

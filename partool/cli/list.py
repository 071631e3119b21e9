"""``partool list``."""

from __future__ import annotations

import json
import time
from typing import Annotated, Literal

import typer

from partool.launch.describe import as_json, duration
from partool.launch.store import RunStore


def command(
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
) -> None:
    """List the runs, the newest first."""
    runs = [(run, run.status()) for run in RunStore().runs()]
    if output == "json":
        typer.echo(json.dumps([as_json(run, status) for run, status in runs], indent=2))
        return
    width = max((len(run.id) for run, _ in runs), default=0)
    for run, status in runs:
        age = duration(time.time() - status.created) + " ago" if status.created else ""
        typer.echo(f"{run.id:<{width}}  {status.state:<9}  {age:<14}  {status.reason}".rstrip())

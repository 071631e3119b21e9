"""``partool status``."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from partool.cli._runs import find_run_or_exit, reaching
from partool.launch.describe import as_json, as_text
from partool.launch.targets import target_of
from partool.plan.terminal import say


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
) -> None:
    """Show how a run is doing."""
    stored = find_run_or_exit(run)
    with reaching(stored):
        status = target_of(stored).status(stored)
        say(json.dumps(as_json(stored, status), indent=2) if output == "json" else as_text(stored, status))

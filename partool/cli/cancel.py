"""``partool cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from partool.cli._runs import fail, find_run_or_exit
from partool.launch.local import LocalTarget


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")],
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without a checkpoint.")] = False,
) -> None:
    """Ask a run to write a checkpoint and stop."""
    found = find_run_or_exit(run)
    if not LocalTarget().cancel(found, now=now):
        fail("PT508", f"{found.id} is not running ({found.status().state})", "partool list shows the runs", 1)
    typer.echo(f"partool: asked {found.id} to stop" + (" at once" if now else " after a checkpoint"), err=True)

"""``partool cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from partool.cli._runs import fail, find_run_or_exit
from partool.launch.local import LocalTarget
from partool.launch.target import LaunchError


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")],
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without a checkpoint.")] = False,
) -> None:
    """Ask a run to write a checkpoint and stop."""
    found = find_run_or_exit(run)
    try:
        asked = LocalTarget().cancel(found, now=now)
    except LaunchError as error:
        fail(error.code, error.message, error.help, error.exit_code)
    if not asked:
        fail("PT508", f"{found.id} is not running ({found.status().state})", "partool list shows the runs", 1)
    typer.echo(f"partool: asked {found.id} to stop" + (" at once" if now else " after a checkpoint"), err=True)

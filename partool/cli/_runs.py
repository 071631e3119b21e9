"""What the commands about runs share."""

from __future__ import annotations

from typing import NoReturn

import typer

from partool.launch.store import Run, RunNotFoundError, RunStore


def find_run_or_exit(query: str) -> Run:
    """Return the run that the user means; ends the command with PT502 if there is none."""
    try:
        return RunStore().find(query)
    except RunNotFoundError as error:
        fail("PT502", str(error), "partool list shows the runs", 1)


def fail(code: str, message: str, help: str, exit_code: int) -> NoReturn:
    """Print a finding that has no place in a file and end the command."""
    typer.echo(f"error[{code}]: {message}" + (f"\n  help: {help}" if help else ""), err=True)
    raise typer.Exit(exit_code)

"""Ends a command with an error that has no position in a file."""

from __future__ import annotations

from typing import NoReturn

import typer

from partool.plan.terminal import say


def fail(code: str, message: str, help: str, exit_code: int) -> NoReturn:
    """Print an error that has no position in a file, and end the command with ``exit_code``."""
    say(f"error[{code}]: {message}" + (f"\n  help: {help}" if help else ""), err=True)
    raise typer.Exit(exit_code)

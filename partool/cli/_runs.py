"""Functions that find runs and print errors and log lines, shared by the commands about runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from pydantic import ValidationError

from partool.launch.store import Run, RunNotFoundError, RunStore
from partool.launch.target import LaunchError, LogLine
from partool.plan.outline import outline
from partool.plan.terminal import of_ranks, say


def find_run_or_exit(query: str) -> Run:
    """Return the run that the user means; ends the command with PT502 if there is none."""
    try:
        return RunStore().find(query)
    except RunNotFoundError as error:
        fail("PT502", str(error), "partool list shows the runs", 1)


def fail(code: str, message: str, help: str, exit_code: int) -> NoReturn:
    """Print a finding that has no position in a file and end the command."""
    say(f"error[{code}]: {message}" + (f"\n  help: {help}" if help else ""), err=True)
    raise typer.Exit(exit_code)


@contextmanager
def reaching(run: Run) -> Iterator[None]:
    """End the command with a finding if the run's target cannot be reached or the run's record cannot be read."""
    try:
        yield
    except LaunchError as error:
        fail(error.code, error.message, error.help, error.exit_code)
    except ValidationError:
        message = f"the record of how {run.id} was submitted cannot be read"
        fail("PT586", message, f"see {run.path / 'submission.json'}", 1)


def show_lines(run: Run, lines: Iterable[LogLine], rank: int | None) -> bool:
    """Write lines of ranks to stdout and stderr, with a prefix if several tasks or ranks are shown.

    Returns True if there were any lines.
    """
    prefixed = rank is None and _several_ranks(run)
    some = False
    for line in lines:
        stream = sys.stderr if line.is_error else sys.stdout
        stream.buffer.write(_mark(line, prefixed=prefixed) + of_ranks(line.text, stream))
        stream.buffer.flush()
        some = True
    return some


def _mark(line: LogLine, *, prefixed: bool) -> bytes:
    """Return the prefix of a line: ``[3] `` or, in an array, ``[task 1] `` or ``[task 1, rank 3] ``."""
    rank = line.rank if prefixed else None
    if line.task is None:
        return b"" if rank is None else b"[%d] " % rank
    return b"[task %d] " % line.task if rank is None else b"[task %d, rank %d] " % (line.task, rank)


def _several_ranks(run: Run) -> bool:
    try:
        return outline(run.plan_file).ranks > 1
    except (OSError, ValueError):
        return True

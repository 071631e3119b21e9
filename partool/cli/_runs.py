"""Finds runs and prints errors and log lines, for the commands about runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from partool.cli._fail import fail
from partool.launch.store import Run, RunNotFoundError, RunStore
from partool.launch.target import LaunchError, LogLine
from partool.plan.outline import outline
from partool.plan.record import DamagedRecordError, damage
from partool.plan.terminal import of_ranks


def find_run_or_exit(query: str) -> Run:
    """Return the run that the user means; ends the command with PT502 if there is none."""
    try:
        return RunStore().find(query)
    except RunNotFoundError as error:
        fail("PT502", str(error), "partool list shows the runs", 1)


def is_run(query: str) -> bool:
    """Return whether there is a run that goes by a name."""
    try:
        return bool(RunStore().find(query))
    except RunNotFoundError:
        return False


@contextmanager
def reaching(run: Run) -> Iterator[None]:
    """Return a context manager that ends the command if the run's target or its record cannot be accessed."""
    try:
        yield
    except LaunchError as error:
        fail(error.code, error.message, error.help, error.exit_code)
    except (ValidationError, DamagedRecordError) as error:
        problem = str(error) if isinstance(error, DamagedRecordError) else damage(error)
        message = f"the record of how {run.id} was submitted cannot be read: {problem}"
        fail("PT586", message, f"see {run.path / 'submission.json'}", 1)


@contextmanager
def reading_records() -> Iterator[None]:
    """Return a context manager that ends the command if a file of the run holds something else than partool writes."""
    try:
        yield
    except DamagedRecordError as error:
        fail("PT586", str(error), "restore the file, or move it away to see the rest", 1)


def show_lines(run: Run, lines: Iterable[LogLine], rank: int | None) -> bool:
    """Write the ranks' log lines to stdout and stderr; returns True if there were any lines.

    Each line gets a prefix if the lines of several tasks or ranks are shown.
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
    """Return the prefix of a log line: ``[3] `` for rank 3, or in an array ``[task 1] `` or ``[task 1, rank 3] ``."""
    rank = line.rank if prefixed else None
    if line.task is None:
        return b"" if rank is None else b"[%d] " % rank
    return b"[task %d] " % line.task if rank is None else b"[task %d, rank %d] " % (line.task, rank)


def _several_ranks(run: Run) -> bool:
    try:
        return outline(run.plan_file).ranks > 1
    except (OSError, ValueError):
        return True

"""``partool logs``."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from partool.cli._runs import fail, find_run_or_exit
from partool.launch.describe import errors_as_text
from partool.launch.local import LocalTarget
from partool.launch.logs import NoLogsError, read


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose logs.")] = 0,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; default the latest.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Show the errors of all ranks instead.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Print a rank's log: its standard output on standard output, its standard error on standard error."""
    found = find_run_or_exit(run)
    if errors:
        typer.echo(errors_as_text(found) or f"no errors on record in {found.id}")
        return
    empty = True
    with suppress(KeyboardInterrupt, BrokenPipeError):
        try:
            for is_error, content in read(LocalTarget(), found, rank, attempt, follow=follow):
                stream = sys.stderr if is_error else sys.stdout
                stream.buffer.write(content)
                stream.buffer.flush()
                empty = False
        except NoLogsError as error:
            fail("PT502", str(error), "", 1)
    if empty:
        typer.echo(f"partool: the log is empty; what rank {rank} did is in {found.path / 'events'}", err=True)

"""``partool logs``."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from partool.cli._fail import fail
from partool.cli._runs import find_run_or_exit, reaching, show_lines
from partool.launch.target import LogQuery, NoLogsError
from partool.launch.targets import target_of
from partool.plan.run import RunStatus
from partool.plan.terminal import say


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's; default: all, merged.")] = None,
    *,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; default the latest.")] = None,
    task: Annotated[int | None, typer.Option("--task", min=0, help="Which task of an array.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Show the errors of all ranks instead.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Print the ranks' logs: their standard output on standard output, their standard error on standard error."""
    stored = find_run_or_exit(run)
    with reaching(stored):
        target = target_of(stored)
        if errors:
            say(target.errors(stored) or f"no errors on record in {stored.id}")
            return
        with suppress(KeyboardInterrupt, BrokenPipeError):
            if follow and (waits := _waits(target.status(stored))):
                say(f"partool: {stored.id} {waits}; its output follows as it comes", err=True)
            try:
                empty = not show_lines(stored, target.logs(stored, LogQuery(rank, attempt, follow, task)), rank)
            except NoLogsError as error:
                waits = _waits(target.status(stored)) if attempt is None else ""
                message = f"no logs yet: {stored.id} {waits}" if waits else str(error)
                fail("PT502", message, f"partool logs -f {stored.id} waits for them" if waits else "", 1)
            if empty:
                whose = "the log is" if rank is None else f"rank {rank}'s log is"
                say(f"partool: {whose} empty; what happened is in {stored.path / 'events'}", err=True)


def _waits(status: RunStatus) -> str:
    """Return that, and why, a run waits for its start; empty if it does not."""
    if status.state not in ("queued", "starting"):
        return ""
    once_more = " again" if status.attempt else ""
    return f"has not started{once_more} ({status.state}" + (f": {status.reason})" if status.reason else ")")

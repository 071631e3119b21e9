"""``partool cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from partool.cli._fail import fail
from partool.cli._runs import find_run_or_exit, reaching
from partool.launch.targets import target_of
from partool.plan.terminal import say


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")],
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without a checkpoint.")] = False,
) -> None:
    """Ask a run to write a checkpoint and stop; a run that still waits in a queue is taken out of the queue."""
    found = find_run_or_exit(run)
    with reaching(found):
        target = target_of(found)
        before = target.status(found).state
        asked = target.cancel(found, now=now)
        if not asked:
            state = target.status(found).state
            fail("PT508", f"{found.id} is not running ({state})", "partool list shows the runs", 1)
    if before == "queued":
        said = f"took {found.id} out of the queue"
    else:  # a run that is still starting has no checkpoint to write
        how = " at once" if now else " after a checkpoint" if before == "running" else ""
        said = f"asked {found.id} to stop{how}"
    say(f"partool: {said}", err=True)

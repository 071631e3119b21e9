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
    stored = find_run_or_exit(run)
    with reaching(stored):
        target = target_of(stored)
        before = target.status(stored).state
        asked = target.cancel(stored, now=now)
        if not asked:
            state = target.status(stored).state
            fail("PT508", f"{stored.id} is not running ({state})", "partool list shows the runs", 1)
    if before == "queued":
        said = f"took {stored.id} out of the queue"
    else:  # a run that is still starting has no checkpoint to write
        how = " at once" if now else " after a checkpoint" if before == "running" else ""
        said = f"asked {stored.id} to stop{how}"
    say(f"partool: {said}", err=True)

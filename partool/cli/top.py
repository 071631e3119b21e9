"""``partool top``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from partool.cli._runs import find_run_or_exit
from partool.launch.describe import step_age
from partool.launch.local.target import LocalTarget
from partool.plan.terminal import open_console
from partool.report.top import RunView


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Watch a run through its event logs, from any terminal."""
    from rich.live import Live

    stored = find_run_or_exit(run)
    target, console, view = LocalTarget(), open_console(), RunView(stored.path, stored.name)
    view.read()
    status = target.status(stored)
    if once or not console.is_terminal or not status.active:
        console.print(view.render(status.state, step_age(stored, status)))
        return
    with Live(view.render(status.state, step_age(stored, status)), console=console, auto_refresh=False) as live:
        try:
            while status.active:
                time.sleep(interval)
                view.read()
                status = target.status(stored)
                live.update(view.render(status.state, step_age(stored, status)), refresh=True)
        except KeyboardInterrupt:
            return

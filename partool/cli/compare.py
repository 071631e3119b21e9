"""``partool compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from partool.cli._fail import fail
from partool.cli._files import printing, write_or_exit
from partool.cli._runs import find_run_or_exit
from partool.launch.store import Run
from partool.plan.event_log import EVENTS
from partool.plan.run import PLAN_FILE, STATUS_FILE
from partool.plan.terminal import say

if TYPE_CHECKING:
    from partool.report.compare import ComparedRun


def command(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="2 to 20 runs: ids, beginnings of them, names, folders.")
    ],
    *,
    over: Annotated[
        Literal["steps", "tokens", "time"], typer.Option("--over", help="What the curves on the terminal run over.")
    ] = "steps",
    html: Annotated[Path | None, typer.Option("--html", help="Also write the comparison as one HTML page.")] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
) -> None:
    """Set runs side by side: curves of loss and validation, what differs in their specs, and their results."""
    from partool.report.compare import LEAST, MOST, comparison_data

    if not LEAST <= len(runs) <= MOST:
        fail("PT535", f"{len(runs)} run{'s' * (len(runs) != 1)} given", f"name {LEAST} to {MOST} runs", 2)
    compared = [_compared(run) for run in _different(runs)]
    if html is not None:
        from partool.report.html_compare import render_compare_html

        write_or_exit(render_compare_html(compared), html)
    if output == "json":
        say(json.dumps(comparison_data(compared), indent=2, default=str))
        return
    from partool.report.terminal_compare import render_comparison

    with printing() as console:
        render_comparison(compared, over, console)


def _different(queries: list[str]) -> list[Run]:
    """Return the runs that words name; ends the command if two words name the same run."""
    by_folder: dict[Path, tuple[str, Run]] = {}
    for query in queries:
        run = _run(query)
        folder = run.path.resolve()
        if folder in by_folder:
            message = f"{by_folder[folder][0]!r} and {query!r} are both the run {run.id}"
            fail("PT536", message, "name each run once", 2)
        by_folder[folder] = (query, run)
    return [run for _, run in by_folder.values()]


def _run(query: str) -> Run:
    """Return the run that a word names; a folder may be a copy that lacks some of a run's files."""
    folder = Path(query)
    if folder.is_dir() and any((folder / name).exists() for name in (STATUS_FILE, PLAN_FILE, EVENTS)):
        return Run(folder.absolute())
    return find_run_or_exit(query)


def _compared(run: Run) -> ComparedRun:
    from partool.report.compare import compared_run

    status = run.status() if (run.path / STATUS_FILE).is_file() else None
    return compared_run(run.path, run.id, status)

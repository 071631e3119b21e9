"""A comparison of runs on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.report.compare import (
    SIGNS,
    ComparedRun,
    compared_charts,
    compared_lines,
    result_cells,
    result_of,
    spec_differences,
)
from partool.report.history import Axis
from partool.report.terminal_curves import can_draw, picture, widest
from partool.report.units import counted

_TALL = 16
_CHARTS = 6
"""Pictures on the terminal; the page has them all."""
_POINTS_PER_COLUMN = 2
_HEADS, _CELLS = 18, 12
"""Columns of the headings of results, and of a run's figures."""


def render_comparison(runs: Sequence[ComparedRun], axis: Axis, console: Console) -> None:
    """Print runs side by side: who they are, their losses over an axis, what differs, and their results."""
    _list(runs, console)
    _curves(runs, axis, console)
    _differences(runs, console)
    _results(runs, console)


def _list(runs: Sequence[ComparedRun], console: Console) -> None:
    table = _table(0, 0)
    for place, run in enumerate(runs):
        lines = [run.id, run.state, *(f"note: {note}" for note in run.notes)]
        table.add_row(Text(SIGNS[place], "bold"), Text("\n".join(lines)))
    console.print(table)
    console.print()


def _curves(runs: Sequence[ComparedRun], axis: Axis, console: Console) -> None:
    charts, most = compared_charts(runs), _POINTS_PER_COLUMN * widest(console)
    drawable = [(chart, *compared_lines(runs, chart, axis, most)) for chart in charts]
    drawable = [each for each in drawable if each[1]]
    if not drawable:
        console.print(Text("No curves: none of the runs has a step in its log."))
    elif can_draw(console):
        for chart, lines, unit in drawable[:_CHARTS]:
            for row in picture(chart, [line for _, line in lines], unit, (widest(console), _TALL)):
                console.print(row, no_wrap=True, crop=True)
        if more := len(drawable[_CHARTS:]):
            console.print(Text(f"--html F draws the losses of {counted(more, 'more set')}."))
    console.print()


def _differences(runs: Sequence[ComparedRun], console: Console) -> None:
    console.print(Text("What differs in the specs", "bold"))
    differences = spec_differences(runs)
    if sum(run.spec is not None for run in runs) < 2:
        console.print(Text("  Fewer than two of the runs have a spec here."))
    elif not differences:
        console.print(Text("  Nothing: the specs are equal."))
    table = _table(1, 3)
    for difference in differences:
        groups: dict[str | None, list[str]] = {}
        for place, (text, run) in enumerate(zip(difference.texts, runs, strict=True)):
            if run.spec is not None:
                groups.setdefault(text, []).append(SIGNS[place])
        words = [f"{' '.join(signs)}: {'not set' if text is None else text}" for text, signs in groups.items()]
        table.add_row(f"  {difference.key}", Text("\n".join(words)))
    console.print(table)
    console.print()


def _results(runs: Sequence[ComparedRun], console: Console) -> None:
    console.print(Text("Results", "bold"))
    cells = result_cells([result_of(run) for run in runs])
    columns = max(1, (console.width - _HEADS) // _CELLS)
    for begin in range(0, len(runs), columns):
        part = cells[begin : begin + columns]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", style="dim", width=_HEADS - 1, overflow="fold")
        for place in range(begin, begin + len(part)):
            table.add_column(SIGNS[place], justify="right", width=_CELLS - 1, header_style="bold", overflow="fold")
        for heading in part[0]:
            table.add_row(f"  {heading}", *(run[heading][0] for run in part))
        console.print(table)


def _table(first: int, second: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(no_wrap=not first, ratio=first or None, overflow="fold")
    table.add_column(ratio=second or None, overflow="fold")
    return table

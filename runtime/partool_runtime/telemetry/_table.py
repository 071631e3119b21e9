"""The closing table: predicted against measured for every term."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from partool_runtime.telemetry._figures import seconds, size
from partool_runtime.telemetry.summary import UNITS, Row

_HEADINGS = {
    "memory": "memory per rank",
    "host": "host memory per rank",
    "time": "time per step",
    "traffic": "sent per step",
}


def closing_table(rows: Sequence[Row], *, ranks: int, world_size: int) -> Table:
    """Return the table of the terms that occur: those predicted or measured, as ``partool report`` shows them."""
    whose = "all ranks" if ranks == world_size else f"{ranks} of {world_size} ranks"
    table = Table(title=f"predicted and measured ({whose})", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("term", no_wrap=True, min_width=18)
    for heading, width in (("predicted", 10), ("measured", 10), ("ratio", 6)):
        table.add_column(heading, justify="right", no_wrap=True, min_width=width)
    table.add_column("measure")
    section = ""
    for row in rows:
        if not row.predicted and not row.measured:
            continue
        if row.section != section:
            if section:
                table.add_section()
            section = row.section
            table.add_row(_HEADINGS[section], style="bold")
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(f"  {row.term}", _value(row, row.predicted), _value(row, row.measured), ratio, row.measure)
    return table


def _value(row: Row, value: float | None) -> str:
    if value is None:
        return "–"
    return seconds(value) if UNITS[row.section] == "s" else size(value)

"""The end of a run: the ranks' combined measurements, ``summary.json``, and the closing table."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from rich import box
from rich.table import Table

from partool.plan.event_log import event_log, last_events
from partool.plan.types import Plan
from partool_runtime.telemetry._figures import seconds, size
from partool_runtime.telemetry.summary import TOTAL, UNITS, Measures, Row, RowJson, combine, mfu, row_json, rows

_HEADINGS = {
    "memory": "memory per rank",
    "host": "host memory per rank",
    "time": "time per step",
    "traffic": "sent per step",
}


def closing_table(rows: Sequence[Row], *, ranks: int, world_size: int) -> Table:
    """Return the table of the terms that were predicted or measured, as ``partool report`` shows them."""
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


SUMMARY_FILE = "summary.json"
_PATIENCE_S = 5.0


class ClosingSummary(TypedDict):
    """Content of ``summary.json``."""

    world_size: int
    ranks: int
    """Ranks whose measurements are in :attr:`terms`."""
    terms: list[RowJson]
    mfu: float | None
    predicted_mfu: float | None
    slow: str | None
    """Why steps took longer than predicted."""


def close_run(
    plan: Plan, run_dir: Path, world_size: int, mine: Measures, since: float, *, wait: bool, slow: str = ""
) -> tuple[Table, ClosingSummary]:
    """Combine this rank's measurements with the measurements in the other ranks' logs, and write ``summary.json``.

    Return the closing table and the content of ``summary.json``. A rank is missing from the result if its log is on
    another machine or if the rank ended early; the result states the number of included ranks. ``slow`` gives the
    reason why steps took longer than predicted. A log's summary belongs to this attempt if it was written after
    ``since`` (Unix time); ``wait`` allows waiting for the summaries, for a few seconds at most.
    """
    ranks = [mine, *_others(run_dir, world_size, since, _PATIENCE_S if wait else 0.0)]
    combined = combine(ranks, busiest=plan.layout.mesh.pp > 1)
    table = rows(plan.prediction, combined)
    step_time = combined.time.get(TOTAL)
    data: ClosingSummary = {
        "world_size": world_size,
        "ranks": len(ranks),
        "terms": [row_json(row) for row in table],
        "mfu": None
        if step_time is None
        else mfu(plan.prediction.time.model_flops, step_time.value, plan.devices.peak_flops, world_size),
        "predicted_mfu": plan.prediction.time.mfu,
        "slow": slow or None,
    }
    _write(run_dir / SUMMARY_FILE, data)
    return closing_table(table, ranks=len(ranks), world_size=world_size), data


def _others(run_dir: Path, world_size: int, since: float, patience_s: float) -> list[Measures]:
    deadline = time.monotonic() + patience_s
    missing = [rank for rank in range(1, world_size) if event_log(run_dir, rank).exists()]
    all_measures: list[Measures] = []
    while missing:
        for rank in list(missing):
            if (measures := _last_measures(event_log(run_dir, rank), since)) is not None:
                all_measures.append(measures)
                missing.remove(rank)
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return all_measures


def _last_measures(log: Path, since: float) -> Measures | None:
    for event in reversed(last_events(log)):
        if event["t"] < since:
            return None
        if event["kind"] == "summary":
            return Measures.from_json(event["data"]["measures"])
    return None


def _write(path: Path, data: ClosingSummary) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # a full disk: the run is over and its weights are safe
        print(f"partool: cannot write {path}: {error}", file=sys.stderr)

"""What a run says of pairs of answers, from the events of its first rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.event_data import PairFigures
from partool.plan.event_log import event_log, last_events
from partool.plan.record import Count, Noted
from partool.report.units import figure

_TITLES = {"step": "training", "validation": "validation"}
_NAMES = {
    "accuracy": "accuracy",
    "margin": "margin",
    "chosen": "reward of chosen",
    "rejected": "reward of rejected",
    "logps_chosen": "log-probability of chosen",
    "logps_rejected": "log-probability of rejected",
    "kl": "KL per token",
    "log_odds": "log odds",
}
"""Figures in the order of the report."""


class PairReport(Noted):
    """The latest means over pairs of answers, of training or of validation."""

    of: str
    step: Count
    figures: PairFigures


def pair_reports(run_dir: Path) -> list[PairReport]:
    """Return the latest figures of training and of validation; empty for a run without pairs of answers.

    Raises :class:`partool.plan.record.DamagedRecordError`.
    """
    newest: dict[str, PairReport] = {}
    for event in last_events(event_log(run_dir, 0), strict=True):
        kind, data = event["kind"], event["data"]
        if kind in _TITLES and data.get("preferences"):
            figures = PairFigures.model_validate(data["preferences"])
            newest[kind] = PairReport(of=_TITLES[kind], step=data["step"], figures=figures)
    return [newest[kind] for kind in _TITLES if kind in newest]


def pair_table(reports: Sequence[PairReport]) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the table of figures, and the cells of each row."""
    heads = ["pairs of answers", *(f"{report.of}, step {report.step}" for report in reports)]
    rows = []
    for field, name in _NAMES.items():
        values = [getattr(report.figures, field) for report in reports]
        if any(value is not None for value in values):
            rows.append([name, *(figure(value, ".1%" if field == "accuracy" else ".4f") for value in values)])
    return heads, rows


def render_pairs(reports: Sequence[PairReport], console: Console) -> None:
    """Print the figures as a table; nothing if there are none."""
    if not reports:
        return
    heads, rows = pair_table(reports)
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(heads):
        table.add_column(Text(name), justify="right" if at else "left", header_style="dim")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    console.print()

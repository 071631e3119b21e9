"""What a run did, beside what was planned: every term, and the pipeline in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.types import Plan
from partool.report.drawing import Drawing
from partool.report.executed import Comparison
from partool.report.terminal_timeline import console_windows, render_timeline
from partool.report.trace import Trace, process, trace
from partool.report.units import seconds, size

SUMMARY_FILE = "summary.json"
_SECTIONS = {"memory": "memory per rank", "time": "time per step", "traffic": "sent per step"}
_STAGES = 16
"""Stages that get a line; of more, those whose times are furthest from the plan's."""


@dataclass(frozen=True)
class Term:
    """A line of predicted against measured, in words."""

    section: str
    name: str
    predicted: str
    measured: str
    ratio: str
    measure: str


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return what the run's last attempt wrote at its end; None if there is nothing that can be read."""
    try:
        found = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("terms"), list) else None


def term_rows(summary: dict[str, Any]) -> list[Term]:
    """Return the terms of a summary that were predicted or measured; those that do not occur are left out."""
    found = []
    for term in summary["terms"]:
        if not term["predicted"] and not term["measured"]:
            continue
        show = seconds if term["unit"] == "s" else size
        values = ["–" if term[key] is None else show(term[key]) for key in ("predicted", "measured")]
        ratio = "" if term["ratio"] is None else f"{term['ratio']:.2f}"
        section = _SECTIONS.get(term["section"], term["section"])
        found.append(Term(section, term["term"], values[0], values[1], ratio, term["measure"]))
    return found


def render_run(
    title: str, summary: dict[str, Any] | None, found: Comparison | None, note: str, console: Console
) -> None:
    """Print a run's terms and its pipeline's timeline; ``note`` says why there is no timeline."""
    console.print(Text(title, "bold"))
    if summary is None:
        console.print("No terms: the run has not ended yet, or was killed.")
    else:
        console.print()
        console.print(_terms(summary))
    console.print()
    if found is None:
        console.print(Text(f"No timeline: {note}."))
        return
    render_comparison(found, console)


def render_comparison(found: Comparison, console: Console) -> None:
    """Print an executed step beside its simulations."""
    console.print(Text(headline(found), "bold"))
    console.print(_spans(found))
    parts = console_windows(found.executed, console, found.simulated.span_s)
    for title, drawing in (("executed", found.executed), ("simulated from measured times", found.simulated)):
        console.print()
        console.print(Text(title, "bold"))
        render_timeline(drawing, console, parts=parts)
    console.print()
    console.print(_ranks(found))
    console.print()
    console.print(_stages(found))


def headline(found: Comparison) -> str:
    """Return what is compared."""
    schedule = found.schedule
    of = f"step {found.step}, of usual length among {len(found.steps)} logged steps"
    return f"{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches: {of}"


def span_rows(found: Comparison) -> list[tuple[str, Drawing, float]]:
    """Return each timeline with its name and the executed span over its own."""
    executed_s = found.executed.span_s
    rows = (
        ("predicted", found.predicted),
        ("simulated from measured times", found.simulated),
        ("executed", found.executed),
    )
    return [(name, drawing, executed_s / drawing.span_s if drawing.span_s else 0.0) for name, drawing in rows]


def comparison_data(found: Comparison) -> dict[str, Any]:
    """Return a comparison as data, in seconds."""
    return {
        "schedule": found.schedule.name,
        "step": found.step,
        "steps": list(found.steps),
        "micro_batches": found.schedule.micro_batches,
        **{
            name: {"span_s": drawing.span_s, "bubble": drawing.bubble}
            for name, drawing in (
                ("predicted", found.predicted),
                ("simulated", found.simulated),
                ("executed", found.executed),
            )
        },
        "ranks": [asdict(rank) for rank in found.ranks],
        "stages": [
            {"stage": stage, "rank": found.schedule.placement[stage], **times} for stage, times in stage_rows(found)
        ],
    }


def stage_rows(found: Comparison) -> list[tuple[int, dict[str, float]]]:
    """Return measured and predicted seconds of each stage per micro-batch."""
    return [
        (
            stage,
            {
                "forward_s": found.measured.forward_s[stage],
                "forward_predicted_s": found.planned.forward_s[stage],
                "backward_s": found.measured.backward_s[stage],
                "backward_predicted_s": found.planned.backward_s[stage],
            },
        )
        for stage in range(found.schedule.stages)
    ]


def comparison_trace(plan: Plan, found: Comparison) -> Trace:
    """Return all three timelines of a step as a file for trace viewers."""
    events: list[Trace] = []
    for number, (name, drawing, _) in enumerate(reversed(span_rows(found))):
        events += process(drawing, f"{plan.name}: {name} ({drawing.name}, step {found.step})", number)
    return trace(events, {"plan": plan.name, "plan_hash": plan.hash, "step": found.step})


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True, header_style="dim")
    return table


def _terms(summary: dict[str, Any]) -> Table:
    table = _table("term", "predicted", "measured", "ratio")
    table.add_column("measure", header_style="dim")
    section = ""
    for term in term_rows(summary):
        if term.section != section:
            section = term.section
            table.add_row(Text(section, "bold"))
        table.add_row(f"  {term.name}", term.predicted, term.measured, term.ratio, term.measure)
    return table


def _spans(found: Comparison) -> Table:
    table = _table("", "first to last action", "ranks idle", "executed / this")
    for name, drawing, ratio in span_rows(found):
        table.add_row(name, seconds(drawing.span_s), f"{drawing.bubble:.1%}", f"{ratio:.2f}")
    return table


def _ranks(found: Comparison) -> Table:
    stages = "owns" if found.schedule.moves == "weights" else "stages"
    table = _table("rank", stages, "compute", "waiting", "between", "idle: executed", "simulated", "predicted")
    for rank, times in enumerate(found.ranks):
        idle = [idle_share(drawing, rank) for drawing in (found.executed, found.simulated, found.predicted)]
        mine = ", ".join(map(str, found.schedule.on_rank(rank)))
        table.add_row(
            str(rank), mine, seconds(times.compute_s), seconds(times.waiting_s), seconds(times.other_s), *idle
        )
    return table


def idle_share(drawing: Drawing, rank: int) -> str:
    """Return how much of a timeline a rank does not compute."""
    return f"{max(0.0, 1.0 - drawing.busy_s[rank] / drawing.span_s):.1%}" if drawing.span_s else "–"


def _stages(found: Comparison) -> Table:
    table = _table("stage", "rank", "forward", "predicted", "ratio", "backward", "predicted", "ratio")
    for stage, times in _shown(stage_rows(found)):
        cells = []
        for name in ("forward", "backward"):
            measured, planned = times[f"{name}_s"], times[f"{name}_predicted_s"]
            ratio = f"{measured / planned:.2f}" if planned and measured else "–"
            cells += [seconds(measured) if measured else "–", seconds(planned), ratio]
        table.add_row(str(stage), str(found.schedule.placement[stage]), *cells)
    return table


def _shown(rows: Sequence[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    def off(row: tuple[int, dict[str, float]]) -> float:
        times = row[1]
        whole = times["forward_predicted_s"] + times["backward_predicted_s"]
        return -abs((times["forward_s"] + times["backward_s"]) / whole - 1.0) if whole else 0.0

    return sorted(sorted(rows, key=off)[:_STAGES], key=lambda row: row[0])

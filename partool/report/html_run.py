"""What a run did as one page: its terms, and its pipeline's timeline beside the simulated one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partool.plan.types import Plan
from partool.report.executed import Comparison
from partool.report.html import page
from partool.report.html_timeline import drawing_view, page_windows
from partool.report.run import headline, idle_share, span_rows, stage_rows, term_rows


def render_run_html(plan: Plan, run: str, summary: dict[str, Any] | None, found: Comparison | None, note: str) -> str:
    """Return the page of a run; ``note`` says why it has no timeline."""
    return page(
        "run.html.jinja",
        plan=plan,
        run=run,
        terms=term_rows(summary) if summary is not None else [],
        pipeline=_pipeline(found) if found is not None else None,
        note=note,
    )


def _pipeline(found: Comparison) -> dict[str, Any]:
    parts = page_windows(found.executed)
    if len(parts) == 1:
        longest_s = max(drawing.span_s for _, drawing, _ in span_rows(found))
        parts = [replace(parts[0], to_s=longest_s)]
    views = [
        (name, drawing_view(drawing, f"timeline-{name.split()[0]}", parts))
        for name, drawing, _ in reversed(span_rows(found))
    ]
    drawings = (found.executed, found.simulated, found.predicted)
    return {
        "headline": headline(found),
        "spans": [(name, drawing.span_s, drawing.bubble, ratio) for name, drawing, ratio in span_rows(found)],
        "view": views[0][1],
        "parts": [
            (part.title, [(name, view.parts[index].svg) for name, view in views]) for index, part in enumerate(parts)
        ],
        "ranks": [
            (rank, ", ".join(map(str, found.schedule.on_rank(rank))), times, [idle_share(it, rank) for it in drawings])
            for rank, times in enumerate(found.ranks)
        ],
        "stages": [(stage, found.schedule.placement[stage], times) for stage, times in stage_rows(found)],
    }

"""A run as one HTML page: its terms, and its pipeline's executed and simulated timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from partool.plan.evaluation_result import EvaluationResult
from partool.plan.run import RunStatus
from partool.plan.types import Plan
from partool.report.executed import Comparison
from partool.report.experts import ExpertLoad, load_table, load_title, shares
from partool.report.headline import Headline, event_texts
from partool.report.html import page
from partool.report.html_curves import curves_view
from partool.report.html_svg import Picture, tag, text
from partool.report.html_timeline import drawing_view, page_windows
from partool.report.pairs import PairReport, pair_table
from partool.report.run import (
    RunSummary,
    headline,
    idle_columns,
    idle_share,
    no_terms,
    not_simulated,
    passes,
    slow_words,
    span_rows,
    stage_cells,
    stage_rows,
    stale_terms,
    term_rows,
)
from partool.report.samples import sample_rows

_FULL = 2
"""Tokens of an expert, as multiples of the mean expert's, from which on its colour is full."""
_EDGED = 64
"""Number of experts up to which gaps between their rectangles can be seen."""


def render_run_html(
    plan: Plan,
    run: str,
    summary: RunSummary | None,
    comparison: Comparison | None,
    note: str,
    *,
    head: Headline,
    status: RunStatus | None = None,
    loads: Sequence[ExpertLoad] = (),
    pairs: Sequence[PairReport] = (),
    result: EvaluationResult | None = None,
) -> str:
    """Return the page of a run: its ``head`` and curves, terms, the ``loads`` of its experts, its pipeline's timeline.

    Of an evaluation the page has its ``result``. ``pairs`` are figures of pairs of answers. ``note`` says why the page
    has no timeline; ``status`` is None if this machine does not know it.
    """
    return page(
        "run.html.jinja",
        has_curves=True,
        plan=plan,
        run=run,
        head=head.rows,
        events=event_texts(head.history),
        curves=curves_view(head.history),
        samples=sample_rows(head.history),
        result="; ".join(result.lines()) if result is not None else "",
        no_terms=no_terms(status),
        stale_terms=stale_terms(status),
        slow_words=slow_words(summary),
        terms=term_rows(summary) if summary is not None else [],
        experts=_experts(loads) if loads else None,
        pairs=pair_table(pairs) if pairs else None,
        pipeline=_pipeline(comparison) if comparison is not None else None,
        note=note,
    )


def _experts(loads: Sequence[ExpertLoad]) -> dict[str, Any]:
    heads, rows = load_table(loads)
    return {
        "title": load_title(loads),
        "full": _FULL,
        "heads": heads,
        "rows": [(cells, _strip(layer)) for cells, layer in zip(rows, loads, strict=True)],
    }


def _strip(layer: ExpertLoad) -> str:
    """Return the SVG of a layer's experts side by side, the busier the darker."""
    loads = shares(layer)
    width = 1000.0 / len(loads)
    name = f"layer {layer.layer}"
    said = f"{len(loads)} experts, {min(loads):.2f} to {max(loads):.2f} times the mean"
    picture = Picture(1000, 24, f"Tokens of the experts of {name}", said, preserveAspectRatio="none", class_="bar")
    edges = {"style": "stroke: none"} if len(loads) > _EDGED else {}
    for at, share in enumerate(loads):
        words = tag("title", text(f"expert {at}: {share:.2f} ×"))
        opacity = min(share / _FULL, 1.0)
        picture.add(
            "rect", words, class_="c0", x=at * width, y=0, width=width, height=24, fill_opacity=opacity, **edges
        )
    return picture.markup(f"experts-{layer.layer}")


def _pipeline(comparison: Comparison) -> dict[str, Any]:
    parts = page_windows(comparison.executed)
    if len(parts) == 1:
        longest_s = max(drawing.span_s for _, drawing, _ in span_rows(comparison))
        parts = [replace(parts[0], to_s=longest_s)]
    views = [
        (name, drawing_view(drawing, f"timeline-{name.split()[0]}", parts))
        for name, drawing, _ in reversed(span_rows(comparison))
    ]
    idle = idle_columns(comparison)
    return {
        "headline": headline(comparison),
        "note": not_simulated(comparison),
        "spans": [(name, drawing.span_s, drawing.bubble, ratio) for name, drawing, ratio in span_rows(comparison)],
        "view": views[0][1],
        "parts": [
            (part.title, [(name, view.parts[index].svg) for name, view in views]) for index, part in enumerate(parts)
        ],
        "idle": [name for name, _ in idle],
        "ranks": [
            (
                rank,
                ", ".join(map(str, comparison.schedule.on_rank(rank))),
                times,
                [idle_share(drawing, rank) for _, drawing in idle],
            )
            for rank, times in enumerate(comparison.ranks)
        ],
        "stage_columns": [
            title
            for _, name in passes(comparison)
            for title in (name.capitalize(), *(("Predicted", "Ratio") if comparison.planned is not None else ()))
        ],
        "stages": [
            (stage, comparison.schedule.placement[stage], stage_cells(times)) for stage, times in stage_rows(comparison)
        ],
    }

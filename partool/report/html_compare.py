"""A comparison of runs as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from partool.report.html import page
from partool.report.html_curves import curves_picture, line_class
from partool.version import __version__

_POINTS = 400
"""Most points of a curve: a page may have 120 of them."""
_AXES: tuple[Axis, ...] = ("steps", "tokens", "time")
_NAMES = 3
"""Most runs that the page's title names."""


def render_compare_html(runs: Sequence[ComparedRun]) -> str:
    """Return the page, which loads nothing from the network; its switch of axes works without JavaScript, too."""
    title = ", ".join(run.id for run in runs[:_NAMES])
    if len(runs) > _NAMES:
        title += f" and {len(runs) - _NAMES} more"
    cells = result_cells([result_of(run) for run in runs])
    return page(
        "compare.html.jinja",
        has_curves=True,
        version=__version__,
        title=title,
        runs=[(SIGNS[place], line_class(place), run) for place, run in enumerate(runs)],
        axes=[(axis, _pictures(runs, axis)) for axis in _AXES],
        heads=list(cells[0]),
        results=[list(each.values()) for each in cells],
        differences=spec_differences(runs),
        specs=sum(run.spec is not None for run in runs),
    )


def _pictures(runs: Sequence[ComparedRun], axis: Axis) -> list[dict[str, Any]]:
    """Return title and SVG of each chart over an axis that has a curve."""
    pictures = []
    for chart in compared_charts(runs):
        lines, unit = compared_lines(runs, chart, axis, _POINTS)
        if lines:
            places = [place for place, _ in lines]
            svg = curves_picture(f"curves-{chart.name}-{axis}", chart, [line for _, line in lines], unit, places=places)
            pictures.append({"title": chart.title, "svg": svg})
    return pictures

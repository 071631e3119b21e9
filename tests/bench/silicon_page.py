"""Writes ``docs/results/silicon.md`` and its picture from the recorded judgements of the tables.

    python tests/bench/silicon_page.py

The judgements are ``tests/bench/results/silicon_*.json``; ``tests/silicon/judge_*.py`` make them from the measurements.
"""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any, NamedTuple

_RESULTS = Path(__file__).parent / "results"
_PAGES = Path(__file__).parents[2] / "docs" / "results"
_TEXT = Path(__file__).parent / "silicon_text.md"
FAMILIES = {"products": "Matrix products", "attention": "Attention", "experts": "Experts", "collectives": "Collectives"}


class Row(NamedTuple):
    """Errors of one table, or of the tables of one device; all are shares."""

    name: str
    rows: int
    shipped: tuple[float, float]
    """Median and 90th percentile of the errors of the shipped tables."""
    left_out: tuple[float, float]
    """The same for tables that were made without the sizes that they are asked for."""
    equations: tuple[float, float]
    """The same for the equations that price devices without tables."""
    ratio: float
    """Median of the equations' seconds divided by the measured ones."""


def rows_of(family: str) -> list[Row]:
    """Return the errors of a family's tables."""
    judged = json.loads((_RESULTS / f"silicon_{family}.json").read_text(encoding="utf-8"))
    return sorted(_READERS[family](judged), key=lambda row: row.name)


def _pair(errors: dict[str, Any], scale: float = 1.0) -> tuple[float, float]:
    return errors["median"] * scale, errors["p90"] * scale


def _worst(each: list[dict[str, Any]], scale: float = 1.0) -> tuple[float, float]:
    return max(_pair(one, scale) for one in each)


def _products(judged: dict[str, Any]) -> list[Row]:
    rows = []
    for name, one in judged.items():
        if "shipped" not in one:
            continue
        shipped, left = one["shipped"], [each for each in one["left out"].values() if each.get("rows")]
        aligned, equations = shipped.get("aligned m") or shipped["m"], shipped["equations"]
        pairs = _pair(aligned, 0.01), _worst(left, 0.01), _pair(equations, 0.01)
        rows.append(Row(name, aligned["rows"], *pairs, equations["ratio"]))
    return rows


def _attention(judged: dict[str, Any]) -> list[Row]:
    rows = []
    for name, one in judged["kernels"].items():
        shipped, equation = one["all, shipped"], one["all, equation"]
        pairs = _pair(shipped), _worst([errors for key, errors in one.items() if "left out" in key]), _pair(equation)
        rows.append(Row(name, shipped["rows"], *pairs, equation["ratio"]))
    return rows


def _experts(judged: dict[str, Any]) -> list[Row]:
    rows = []
    for name, one in judged.items():
        left, equations = one.get("tokens left out"), one.get("equations, one rank")
        if left and equations:
            pairs = _pair(one["shipped"]), _pair(left), _pair(equations)
            rows.append(Row(name, one["shipped"]["n"], *pairs, equations["middle"]))
    return rows


def _collectives(judged: dict[str, Any]) -> list[Row]:
    return [
        Row(
            name,
            one["shipped"]["count"],
            *(_pair(one[key]) for key in ("shipped", "sizes left out", "equations")),
            one["equations"]["ratio"],
        )
        for name, one in judged["devices"].items()
    ]


_READERS = {"products": _products, "attention": _attention, "experts": _experts, "collectives": _collectives}


def table(family: str) -> str:
    """Return a family's errors as a Markdown table, in percent."""
    lines = [
        "| table | rows | shipped | sizes left out | equations | equations / measured |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows_of(family):
        cells = (f"{100 * one:.1f} / {100 * high:.0f}" for one, high in (row.shipped, row.left_out, row.equations))
        lines.append(f"| {row.name} | {row.rows:,} | {' | '.join(cells)} | {row.ratio:.2f} |")
    return "\n".join(lines)


def page() -> str:
    """Return the page: the text of ``silicon_text.md``, with a table in the place of each ``{family}``."""
    text = _TEXT.read_text(encoding="utf-8")
    for family in FAMILIES:
        text = text.replace(f"{{{family}}}", table(family))
    judged = json.loads((_RESULTS / "silicon_products.json").read_text(encoding="utf-8"))
    apart = judged["h200/fp8_block/deepgemm"]["between frameworks"]["SGLang - TRTLLM"]
    return text.replace("{deepgemm}", f"{apart['median']:.0f} / {apart['p90']:.0f}")


_LEFT, _RIGHT, _STEP, _WIDE = 250, 30, 13, 900
_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)


def picture() -> str:
    """Return an SVG: a line per table from the median to the 90th percentile of its errors, on a logarithmic scale."""
    span = log(_TICKS[-1] / _TICKS[0])

    def place(share: float) -> float:
        percent = min(max(100 * share, _TICKS[0]), _TICKS[-1])
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * log(percent / _TICKS[0]) / span

    parts, y = [], 40.0
    for family, title in FAMILIES.items():
        y += 24
        parts.append(f'<text x="10" y="{y:.0f}" class="title">{title}</text>')
        for row in rows_of(family):
            y += _STEP
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 3.5:.1f}" class="name">{row.name}</text>')
            for kind, (middle, high), shift in (("old", row.equations, 2), ("new", row.left_out, -2)):
                x, end = place(middle), place(high)
                parts.append(f'<path d="M{x:.1f} {y + shift:.1f}H{end:.1f}" class="{kind}"/>')
                parts.append(f'<circle cx="{x:.1f}" cy="{y + shift:.1f}" r="3" class="{kind}"/>')
    height = y + 30
    grid = "".join(
        f'<path d="M{place(tick / 100):.1f} 44V{height - 20:.0f}" class="grid"/>'
        f'<text x="{place(tick / 100):.1f}" y="38" class="tick">{tick:g} %</text>'
        for tick in _TICKS
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {height:.0f}" role="img">'
        "<title>Errors of tables with sizes left out, and of the equations, median to 90th percentile</title>"
        "<style>text{font:10px sans-serif;fill:#57606a}.title{font-size:12px;font-weight:bold}"
        ".name{text-anchor:end}.tick{text-anchor:middle}path{fill:none}.grid{stroke:#8c959f55}"
        "path.new{stroke:#1f77b4;stroke-width:2}circle.new{fill:#1f77b4}"
        "path.old{stroke:#d9773f;stroke-width:1}circle.old{fill:#d9773f}</style>"
        f'<rect width="{_WIDE}" height="{height:.0f}" fill="#fff"/>'
        '<circle cx="20" cy="16" r="4" class="new"/><text x="30" y="20">tables without the sizes in question</text>'
        '<circle cx="260" cy="16" r="4" class="old"/><text x="270" y="20">equations; dot: median, line: to the 90th '
        f"percentile</text>{grid}{''.join(parts)}</svg>\n"
    )


def main() -> None:
    """Write the page and its picture."""
    (_PAGES / "silicon.md").write_text(page(), encoding="utf-8")
    (_PAGES / "silicon.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Draws predicted against measured seconds of the committed samples: ``docs/results/silicon-<family>.svg``.

    python tests/bench/silicon_scatter.py

There is a panel for each table. Its points are the samples of ``tests/data/silicon``, which were drawn from the
measurements with seed 50, from each band of sizes; most of them are no points of the tables.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import ceil, log
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "silicon"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import judge_collectives
import judge_experts
from silicon import attention, judge_attention, judge_products
from silicon.report_attention import equation_errors

from partool.catalog.silicon.experts import Sizes, curves
from partool.cost.silicon.products import product_table
from partool.cost.time.gemm import equations_s

_TESTS = Path(__file__).parents[1]
_SAMPLES = _TESTS / "data" / "silicon"
_PAGES = _TESTS.parent / "docs" / "results"
Floats = NDArray[np.float64]


class Panel(NamedTuple):
    """Points of one table."""

    device: str
    kernel: str
    measured_s: Floats
    table: Floats
    """Predicted over measured seconds, by the table."""
    equations_at_s: Floats
    """Measured seconds of the points that the equations can price."""
    equations: Floats


def _rows(name: str, *keys: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Return a sample's rows by the texts of some columns."""
    rows = defaultdict(list)
    for row in csv.DictReader(gzip.decompress((_SAMPLES / f"{name}.csv.gz").read_bytes()).decode().splitlines()):
        rows[tuple(row[key] for key in keys)].append(row)
    return dict(sorted(rows.items()))


def _columns(rows: list[dict[str, str]], *names: str) -> list[Floats]:
    return [np.array([float(row[name]) for row in rows]) for name in names]


def products() -> Iterator[Panel]:
    """Yield the panels of matrix products."""
    for (device, table), rows in _rows("products", "device", "table").items():
        m, n, k, microseconds = _columns(rows, "m", "n", "k", "microseconds")
        work, measured = judge_products.workload(device, table), 1e-6 * microseconds
        priced = product_table(work)
        assert priced is not None
        seconds, equation = judge_products.table_s(device, table, m, n, k), equations_s(work, m, n, k)
        yield Panel(device, table, measured, seconds / measured, measured, equation / measured)


def attentions() -> Iterator[Panel]:
    """Yield the panels of attention, with all widths and windows of a kernel; equations price full attention."""
    by_kernel = defaultdict(list)
    for rows in attention.read_sample():
        by_kernel[rows.device, rows.kernel].append(rows)
    for (device, kernel), each in sorted(by_kernel.items()):
        ratios = [1.0 + judge_attention.errors(rows, judge_attention.shipped(rows)) for rows in each]
        measured = [rows.seconds[rows.length >= judge_attention.SHORTEST] for rows in each]
        full = [rows.taken((rows.window == 0) & (rows.length >= judge_attention.SHORTEST)) for rows in each]
        equation = [1.0 + equation_errors(rows) for rows in full]
        at = [rows.seconds for rows in full]
        yield Panel(device, kernel, *(np.concatenate(parts) for parts in (measured, ratios, at, equation)))


def experts() -> Iterator[Panel]:
    """Yield the panels of layers of experts; equations price rows without work for experts of other ranks."""
    for (name,), rows in _rows("experts", "table").items():
        device, dtype, kernel = name.split("/")
        parts: list[list[Floats]] = []
        for load in sorted({row["load"] for row in rows}):
            here = [row for row in rows if row["load"] == load]
            each, local, hidden, inner, elsewhere, measured = _columns(
                here, "rows_per_expert", "experts", "hidden", "inner", "elsewhere", "seconds"
            )
            table = curves(f"{name}/{load}")
            assert table is not None
            sizes = Sizes(each, local, hidden, inner, table.gated)
            columns = {"each": each, "experts": local, "hidden": hidden, "inner": inner}
            layers = SimpleNamespace(device=device, dtype=dtype, columns=columns, gated=table.gated, sizes=sizes)
            alone = elsewhere == 1.0
            equation = judge_experts.before_s(cast(Any, layers)) / measured
            parts.append([measured, table.seconds(sizes) * elsewhere / measured, measured[alone], equation[alone]])
        yield Panel(device, f"{dtype} {kernel}", *(np.concatenate(part) for part in zip(*parts, strict=True)))


def collectives() -> Iterator[Panel]:
    """Yield the panels of collectives, by device."""
    points = judge_collectives.sampled()
    for device in sorted({at[0] for at in points}):
        here = {at: of for at, of in points.items() if at[0] == device and at[-1] >= judge_collectives.JUDGED}
        measured = np.array([float(np.median(of)) for of in here.values()])
        medians = {at: [one] for at, one in zip(here, measured.tolist(), strict=True)}
        table, equation = (
            np.array([of for at in medians for of in next(iter(price({at: medians[at]}).values()))])
            for price in (judge_collectives.shipped, judge_collectives.equations)
        )
        yield Panel(device, "NCCL, all operations", measured, table, measured, equation)


FAMILIES = {"products": products, "attention": attentions, "experts": experts, "collectives": collectives}
_COLUMNS, _WIDE, _HIGH = 4, 215, 200
_LEFT, _TOP, _PLOT_WIDE, _PLOT_HIGH = 32, 46, 172, 80
_FACTOR = 3.0
"""Largest ratio of predicted to measured seconds, and inverse of the least one; points beyond are at the edge."""
_LEVELS = (0.05, 0.5, 0.95)
_STYLE = (
    "text{font:12px sans-serif;fill:#1f2328}.t{font-weight:bold;font-size:13px}.r{text-anchor:end}"
    ".bg{fill:#fff}path{fill:none;stroke-linecap:round}.g{stroke:#8c959f;stroke-width:.7;opacity:.6}"
    ".new{stroke:#0b62b8;stroke-width:3.4}.old{stroke:#d9773f;stroke-width:3.4;opacity:.65}"
    ".a{fill:#0b62b8}.b{fill:#b04a12}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bg{fill:#0d1117}.new{stroke:#58a6ff}.a{fill:#58a6ff}"
    ".old{stroke:#f0935a}.b{fill:#f0a36b}}"
    "@media(max-width:600px){text,.t{font-size:20px}.k{font-size:17px}}"
)


def picture_of(panels: list[Panel], family: str) -> str:
    """Return a family's picture: ratios of predicted to measured seconds over measured seconds, on logarithmic axes."""
    every = np.concatenate([panel.measured_s for panel in panels])
    low, high = 10.0 ** np.floor(np.log10(every.min())), 10.0 ** np.ceil(np.log10(every.max()))
    parts = []
    for place, panel in enumerate(panels):
        x, y = _WIDE * (place % _COLUMNS), 56 + _HIGH * (place // _COLUMNS)
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, low, high)}</g>\n')
    wide, tall = _WIDE * _COLUMNS, 60 + _HIGH * ceil(len(panels) / _COLUMNS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" role="img">'
        f"<title>Predicted over measured seconds of {family}</title><style>{_STYLE}</style>"
        f'<path class="bg" d="M0 0H{wide}V{tall}H0z"/>'
        '<path class="new" d="M14 16h0"/><text x="24" y="21" class="a">table</text>'
        '<path class="old" d="M94 16h0"/><text x="104" y="21" class="b">equations</text>'
        '<text x="230" y="21">5th, 50th and 95th percentile below</text>'
        f'<text x="24" y="46">predicted / measured, over measured time</text>\n{"".join(parts)}</svg>\n'
    )


def _panel(panel: Panel, low: float, high: float) -> str:
    """Return one table's panel."""
    middle, bottom, right = _TOP + _PLOT_HIGH // 2, _TOP + _PLOT_HIGH, _LEFT + _PLOT_WIDE
    ticks = "".join(
        f'<text x="{x}" y="{bottom + 17}"{end}>{_time(at)}</text>'
        for at, x, end in ((low, _LEFT, ""), (high, right, ' class="r"'))
    )
    old, new = (_quantiles(ratios) for ratios in (panel.equations, panel.table))
    return (
        f'<text x="4" y="18" class="t">{panel.device}</text><text x="4" y="36" class="k">{_short(panel.kernel)}</text>'
        f'<path class="g" d="M{_LEFT} {_TOP}V{bottom}H{right}M{_LEFT} {middle}H{right}"/>'
        f'<text x="{_LEFT - 4}" y="{_TOP + 9}" class="r">3</text>'
        f'<text x="{_LEFT - 4}" y="{middle + 4}" class="r">1</text>'
        f'<text x="{_LEFT - 4}" y="{bottom}" class="r">⅓</text>{ticks}'
        f'<path class="old" d="{_dots(panel.equations_at_s, panel.equations, low, high)}"/>'
        f'<path class="new" d="{_dots(panel.measured_s, panel.table, low, high)}"/>'
        f'<text x="{_LEFT}" y="{bottom + 37}" class="a">{new}</text>'
        f'<text x="{_LEFT}" y="{bottom + 56}" class="b">{old}</text>'
    )


def _short(kernel: str) -> str:
    return kernel.removeprefix("vllm_").replace("flashinfer_trtllmprefill", "trtllm prefill").replace("/", " ")


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.999 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns"


def _quantiles(ratios: Floats) -> str:
    return " · ".join(f"{each:.2f}" for each in np.quantile(ratios, _LEVELS)) if len(ratios) else ""


def _dots(seconds: Floats, ratios: Floats, low: float, high: float) -> str:
    x = _LEFT + _PLOT_WIDE * np.log(seconds / low) / log(high / low)
    y = _TOP + _PLOT_HIGH / 2 * (1.0 - np.clip(np.log(ratios) / log(_FACTOR), -1.0, 1.0))
    return "".join(f"M{a} {b}h0" for a, b in sorted({(round(a), round(b)) for a, b in zip(x, y, strict=True)}))


def main() -> None:
    """Write the pictures."""
    for family, price in FAMILIES.items():
        (_PAGES / f"silicon-{family}.svg").write_text(picture_of(list(price()), family), encoding="utf-8")


if __name__ == "__main__":
    main()

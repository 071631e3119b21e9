"""Makes ``partool/catalog/silicon/experts.*`` from measured layers of experts: ``python tests/silicon/experts.py``."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
from experts_data import Rows, amd, base_s, nvidia
from numpy.typing import NDArray
from writing import origin, write

from partool.catalog.silicon.experts import Curves
from partool.catalog.silicon.grid import STEP, MeasuredGrid

EACH = np.rint(100.0 * 2.0 ** np.arange(2.0, 13.1, 0.5)) / 100.0
"""Rows per expert along a curve."""
_WIDTH = 0.5
"""Width, in powers of two, of the window in which measured rows are fitted by a line."""
_ROUND = 10 * STEP
"""Ratios are rounded by up to 2 %, which halves the files; two frameworks' calls of one kernel are further apart."""
_OUTLYING = 0.1
"""Distance in logarithms from a first fit beyond which a row's weight falls."""


def curves_of(rows: Rows) -> Curves:
    """Return a table made of measured rows."""
    c = rows.columns
    sizes = np.stack([c["hidden"], c["inner"], c["experts"]], axis=1)
    points, place = np.unique(sizes, axis=0, return_inverse=True)
    order = np.lexsort((c["each"], place.ravel()))
    starts = np.searchsorted(place.ravel()[order], np.arange(len(points) + 1))
    at, ratio = np.log2(c["each"]), np.log(c["seconds"] / base_s(rows))
    log_ratio = np.stack([_curve(at[order[a:b]], ratio[order[a:b]]) for a, b in itertools.pairwise(starts)])
    entry = origin(rows.device, rows.kernel, rows.framework, len(at), rows.dropped)
    entry["source"], entry["licence"] = rows.source, rows.licence
    return Curves(points, EACH, np.rint(log_ratio / _ROUND) * _ROUND, rows.rates, rows.element_bytes, rows.gated, entry)


def _curve(at: NDArray[np.float64], ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the curve through measured ratios: in a window around each place a line, without outlying rows."""
    weight = np.ones(len(at))
    for _ in range(2):
        apart = np.abs(_lines(at, at, ratio, weight) - ratio)
        weight = 1.0 / np.maximum(1.0, apart / _OUTLYING)
    return _lines(np.clip(np.log2(EACH), at.min(), at.max()), at, ratio, weight)


def _lines(
    where: NDArray[np.float64], at: NDArray[np.float64], ratio: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    away = np.abs(where[:, None] - at)
    near = (np.exp(-0.5 * (away / _WIDTH) ** 2) + 1e-12 * np.exp(-8.0 * away)) * weight
    near /= np.sum(near, axis=1, keepdims=True)
    centre, mean = near @ at, near @ ratio
    apart = at - centre[:, None]
    slope = np.sum(near * apart * (ratio - mean[:, None]), axis=1) / (np.sum(near * apart**2, axis=1) + 0.02)
    return np.asarray(mean + slope * (where - centre))


def made(tables: list[Rows]) -> dict[str, Curves]:
    """Return the shipped tables: one of even loads and one of loads by a power law for each device, type and kernel."""
    out = {}
    for rows in tables:
        skewed = rows.columns["alpha"] > 0
        for load, mask in (("even", ~skewed), ("skewed", skewed)):
            if np.any(mask):
                out[f"{rows.name}/{load}"] = curves_of(rows.where(mask))
    return out


def main() -> None:
    grids, points = {}, {}
    numbers: dict[bytes, str] = {}
    for name, curves in made(nvidia() + amd()).items():
        more: Any = {
            "flops_per_s": curves.rates.flops_per_s, "bytes_per_s": curves.rates.bytes_per_s,
            "element_bytes": curves.element_bytes, "gated": curves.gated,
            "points": numbers.setdefault(curves.points.tobytes(), f"points/{len(numbers)}"),
        }  # fmt: skip
        entry = cast(Any, {**curves.origin, **more})
        grids[name] = MeasuredGrid({"rows_per_expert": curves.each}, curves.log_ratio, entry)
        points[more["points"]] = curves.points.astype(np.int16)
        print(name, len(curves.points), curves.origin["rows"], curves.origin["dropped"])
    print(write("experts", grids, points), "bytes")


if __name__ == "__main__":
    main()

"""Compares the tables of attention with the measurements: all of them, and sizes that the tables were made without."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from silicon.attention import CACHE_FILE, WINDOWS
from silicon.attention_fit import Floats, Rows, Split, split

from partool.catalog.silicon.grid import grid

LEFT_OUT: dict[str, tuple[int, ...]] = {
    "length": (1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288),
    "batch": (2, 4, 8, 16, 32, 64),
    "heads": (2, 4, 8, 12, 16, 24, 32, 40, 48, 64),
}
"""Sizes inside of the measured ranges; each is left out in turn."""
SHORTEST = 1024
"""Errors count from this length on, where training works."""


def shipped(rows: Rows) -> Split:
    """Return the tables of the catalog for a kernel, with the cost of its cache."""
    name = f"{rows.device}/bf16/{rows.kernel}/{rows.width}"
    tables = {window: grid("attention", f"{name}/{window or 'all'}") for window in WINDOWS}
    cache = json.loads(CACHE_FILE.read_bytes())[name]
    return Split({window: table.log_s for window, table in tables.items() if table is not None}, cache)


def errors(rows: Rows, tables: Split, *, shortest: int = SHORTEST) -> Floats:
    """Return relative errors of predicted seconds for rows of at least ``shortest`` tokens."""
    long = rows.taken(rows.length >= shortest)
    return tables.predicted(long) / long.seconds - 1.0


def left_out(rows: Rows, axis: str, sizes: Iterable[int] | None = None) -> Floats:
    """Return relative errors for the rows of each size of ``axis``, predicted by tables made of the other rows."""
    parts: list[Floats] = [np.empty(0)]
    for size in LEFT_OUT[axis] if sizes is None else sizes:
        out: NDArray[np.bool_] = getattr(rows, axis) == size
        rest = rows.taken(~out)
        windows = set(np.unique(rest.window).tolist())
        out &= np.isin(rows.window, sorted(windows))
        if out.any() and windows:
            parts.append(errors(rows.taken(out), split(rest)))
    return np.concatenate(parts)


def quantiles(error: Floats) -> dict[str, float]:
    """Return the number of errors, the median of predicted / measured, and quantiles of the size of errors."""
    size = np.abs(error)
    return {
        "rows": len(error),
        "ratio": round(float(np.median(1.0 + error)), 4),
        "median": round(float(np.median(size)), 4),
        "p90": round(float(np.quantile(size, 0.9)), 4),
    }

"""Draws the committed sample of measured layers of experts: ``python tests/silicon/sample_experts.py``.

The same number of rows of each table and band of tokens, with a fixed seed. No curve passes through a measured row, so
all rows lie off the grid.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
from pathlib import Path

import numpy as np
from experts_data import amd, base_s, nvidia

from partool.catalog.silicon.experts import equation_s

SAMPLE = Path(__file__).parents[1] / "data" / "silicon" / "experts.csv.gz"
SEED = 50
_BANDS = (1024, 2048, 6144, np.inf)
_EACH = 16


def main() -> None:
    """Write the sample."""
    random, text = np.random.default_rng(SEED), io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(("table", "load", "hidden", "inner", "experts", "rows_per_expert", "tokens", "elsewhere", "seconds"))
    for rows in nvidia() + amd():
        c = rows.columns
        elsewhere = base_s(rows) / equation_s(rows.sizes, rows.rates, rows.element_bytes)
        for low, high in itertools.pairwise(_BANDS):
            inside = np.flatnonzero((c["tokens"] >= low) & (c["tokens"] < high))
            for row in np.sort(random.permutation(inside)[:_EACH]):
                load = "skewed" if c["alpha"][row] else "even"
                sizes = (int(c[name][row]) for name in ("hidden", "inner", "experts"))
                figures = (f"{c['each'][row]:.6g}", int(c["tokens"][row]))
                out.writerow((rows.name, load, *sizes, *figures, f"{elsewhere[row]:.6g}", f"{c['seconds'][row]:.4g}"))
    SAMPLE.parent.mkdir(parents=True, exist_ok=True)
    with SAMPLE.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.getvalue().encode())


if __name__ == "__main__":
    main()

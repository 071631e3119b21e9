"""Tables of measured matrix products: a grid, and the waves of tiles that its seconds are relative to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, NotRequired, cast

import numpy as np
from numpy.typing import NDArray

from partool.catalog.silicon.grid import MeasuredGrid, TableEntry, entries, grid, interpolate

Column = Any
_SHARE = 0.5
"""Exponent of the waves. The last wave takes less time than a full one, because its tiles share the caches and the
memory with fewer others, and libraries choose smaller tiles where many multiprocessors would be idle. Exponents from
0.4 to 0.6 leave the same errors on sizes that are left out (``tests/silicon/judge_products.py``)."""


class Waves(NamedTuple):
    """How a kernel divides its result among multiprocessors."""

    multiprocessors: int
    rows: int
    """Rows of the tile of the result that one multiprocessor computes at a time."""
    columns: int

    def log(self, m: Column, n: Column) -> Column:
        """Return the logarithm of the number of waves, to the power that seconds follow; it never falls with m or n.

        All multiprocessors compute one tile each in a wave ("tile quantization" and "wave quantization" in NVIDIA's
        "Matrix Multiplication Background User's Guide").
        """
        tiles = np.ceil(m / self.rows) * np.ceil(n / self.columns)
        return _SHARE * np.log(np.ceil(tiles / self.multiprocessors))


class ProductsEntry(TableEntry):
    """One table of the family's JSON file."""

    waves: NotRequired[list[int]]
    """Fields of :class:`Waves`, where seconds between the grid's points follow them."""


@dataclass(frozen=True)
class ProductGrid:
    """Seconds of products at all combinations of measured m, n and k, and what lies between these points."""

    grid: MeasuredGrid
    """Logarithms of seconds less :meth:`Waves.log`; they never fall with m."""
    waves: Waves | None

    def log_s(self, m: Column, n: Column, k: Column) -> NDArray[np.float64]:
        """Return logarithms of seconds at columns of sides inside of the grid."""
        logs = interpolate(self.grid.log_axes, self.grid.log_s, [np.log(side) for side in (m, n, k)])
        return logs if self.waves is None else logs + self.waves.log(m, n)


@cache
def product_grid(name: str) -> ProductGrid | None:
    """Return a table of seconds of products; None if there is none of this name."""
    of = grid("products", name)
    if of is None:
        return None
    waves = cast(ProductsEntry, entries("products")[name]).get("waves")
    return ProductGrid(of, Waves(*waves) if waves else None)

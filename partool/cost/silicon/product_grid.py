"""A table of measured products with what turns its seconds into a device's, and with rows of the user's machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from partool.catalog.silicon.grid import MeasuredGrid, Origin, grid, interpolate
from partool.catalog.silicon.products import ProductGrid, product_grid
from partool.cost.case import Column
from partool.cost.silicon import calibrated
from partool.spec.measured_rows import ProductRow

_START_S = 2.8e-6
"""Start of a kernel, in products beyond the tables' sizes."""
_MULTIPLE = 16
"""Products whose m is a multiple of this number, and products with other m, follow different curves."""


_NOBODY: Origin = {
    "device": "", "kernel": "", "framework": "", "source": "", "licence": "", "date": "", "rows": 0, "dropped": {},
}  # fmt: skip


class Equation(Protocol):
    """Seconds of products [m, k] × [k, n]."""

    def __call__(self, m: Column, n: Column, k: Column) -> Column:
        """Return the seconds."""


class TableRates(NamedTuple):
    """What a table's device reaches in large products, and from its memory."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ProductTable:
    """A table of seconds, and what turns them into a device's."""

    name: str
    measured: ProductGrid
    unaligned: MeasuredGrid | None
    """Logarithms of the ratios by which products with other m than multiples of 16 take longer."""
    large: TableRates
    """FLOP/s of the table's large products, and bytes per second of streaming kernels on the measured device."""
    element_bytes: float
    ratio: float
    """Ratio by which the whole table is scaled."""
    flop_s: float
    """Seconds per FLOP that are added, those of the clocks of a whole step included."""
    clocks_flop_s: float
    """Seconds per FLOP that are added for the clocks of a whole step, which are lower than those of one product."""
    byte_s: float
    """Seconds per byte that are added."""
    rows: frozenset[tuple[float, ...]] = frozenset()
    """Sides of the products that were measured on the user's machine."""
    before: ProductTable | None = None
    """The table without these rows and without the clocks of a whole step; None without rows."""

    def seconds(self, m: Column, n: Column, k: Column) -> Column:
        """Return the seconds of products [m, k] × [k, n], whose sides are 1 or more."""
        at = (m, n, k)
        inside = self._clipped(at)
        seconds = np.exp(self.measured.log_s(*inside))
        if self.unaligned is not None:
            seconds = seconds * self._unaligned(m, inside)
        if any(one is not other for one, other in zip(at, inside, strict=True)):
            seconds = seconds * (self._grown_s(*at) / self._grown_s(*inside))
        seconds = self.ratio * seconds
        if self.flop_s:
            seconds = seconds + self.flop_s * (2.0 * m * n * k)
        if self.byte_s:
            seconds = seconds + self.byte_s * self._moved_bytes(m, n, k)
        return seconds

    def _clipped(self, at: Sequence[Column]) -> list[Column]:
        """Return the nearest sides of the table; a column that lies inside is returned as it is."""
        clipped = []
        for side, values in zip(at, self.measured.grid.axes.values(), strict=True):
            least, most = values[0], values[-1]
            low, high = (np.min(side), np.max(side)) if np.ndim(side) else (side, side)
            outside = low < least or high > most
            clipped.append(np.clip(side, least, most) if outside else side)
        return clipped

    def _unaligned(self, m: Column, inside: Sequence[Column]) -> Column:
        """Return the ratio to the products between multiples of 16; 1 for these, and for fewer than 16 rows."""
        assert self.unaligned is not None
        other = (np.mod(m, _MULTIPLE) != 0) & (np.asarray(m) > _MULTIPLE)
        if not np.any(other):
            return 1.0
        axes = self.unaligned.axes.values()
        nearest = [np.clip(side, values[0], values[-1]) for side, values in zip(inside, axes, strict=True)]
        return np.exp(np.where(other, _at(self.unaligned, nearest), 0.0))

    def _grown_s(self, m: Column, n: Column, k: Column) -> Column:
        """Return seconds that grow smoothly with all sides: beyond the table, its price grows in their proportion."""
        return 2.0 * m * n * k / self.large.flops_per_s + self._moved_bytes(m, n, k) / self.large.bytes_per_s + _START_S

    def _moved_bytes(self, m: Column, n: Column, k: Column) -> Column:
        return self.element_bytes * (m * k + n * k) + 2.0 * m * n


def with_rows(of: ProductTable, rows: tuple[ProductRow, ...], engine: float) -> ProductTable:
    """Return a table with rows in the place of its prices; the clocks of a whole step come on top.

    ``engine`` is the ratio of the seconds of the code base's kernel to those of the measured one.
    """
    sides = {(float(row.m), float(row.n), float(row.k)): row.seconds * engine for row in rows}
    plain = replace(of, flop_s=of.flop_s - of.clocks_flop_s, clocks_flop_s=0.0)
    scales = (plain.ratio, plain.flop_s, plain.byte_s)
    merged = _merged(of.name, of.large, of.element_bytes, scales, tuple(sides.items()))
    return replace(
        of, measured=merged, ratio=1.0, flop_s=of.clocks_flop_s, byte_s=0.0, rows=frozenset(sides), before=plain
    )


@lru_cache(maxsize=16)
def _merged(
    name: str,
    large: TableRates,
    element_bytes: float,
    scales: tuple[float, float, float],
    rows: tuple[tuple[tuple[float, ...], float], ...],
) -> ProductGrid:
    measured = product_grid(name)
    assert measured is not None
    ratio, flop_s, byte_s = scales
    unaligned = grid("products", f"{name}/unaligned")
    before = ProductTable(name, measured, unaligned, large, element_bytes, ratio, flop_s, 0.0, byte_s)
    return _row_points(before, rows)


def equation_table(
    equation: Equation, rows: tuple[ProductRow, ...], large: TableRates, element_bytes: float, clocks_flop_s: float
) -> ProductTable:
    """Return a table of rows and, around them, of the seconds of an equation, which lacks the clocks of a whole step.

    The table has powers of two: between them the steps of partly filled tiles are evened out.
    """
    sizes: NDArray[np.float64] = 2.0 ** np.arange(4, 17, dtype=np.float64)
    axes = {"m": sizes, "n": sizes[2:], "k": sizes[2:]}
    points = np.meshgrid(*axes.values(), indexing="ij")
    log_s = np.log(equation(*(side.ravel() for side in points))).reshape(points[0].shape)
    measured = ProductGrid(MeasuredGrid(axes, log_s, _NOBODY), None)
    before = ProductTable("", measured, None, large, element_bytes, 1.0, 0.0, 0.0, 0.0)
    sides = {(float(row.m), float(row.n), float(row.k)): row.seconds for row in rows}
    merged = _row_points(before, tuple(sides.items()))
    return replace(
        before, measured=merged, flop_s=clocks_flop_s, clocks_flop_s=clocks_flop_s, rows=frozenset(sides),
        before=before,
    )  # fmt: skip


def _row_points(before: ProductTable, rows: tuple[tuple[tuple[float, ...], float], ...]) -> ProductGrid:
    """Return a table's grid with rows among its points.

    Between rows the ratio of measured to priced seconds is interpolated. Seconds grow with m, as in every table.
    """
    sides = np.array([each for each, _ in rows])
    log_ratios = np.log([seconds for _, seconds in rows]) - np.log([float(before.seconds(*each)) for each in sides])
    axes, places = calibrated.merged_axes(list(before.measured.grid.axes.values()), sides)
    points = np.meshgrid(*axes, indexing="ij")
    aligned = replace(before, unaligned=None)
    log_s = np.log(aligned.seconds(*(side.ravel() for side in points))).reshape(points[0].shape)
    ratio_at = calibrated.spread(np.log(sides), log_ratios, np.log(np.stack(points, axis=-1)))
    is_row = np.zeros(log_s.shape, bool)
    is_row[places] = True
    waves, origin = before.measured.waves, before.measured.grid.origin
    log_waves = 0.0 if waves is None else waves.log(points[0], points[1])
    even = calibrated.pinned(log_s + ratio_at - log_waves, is_row)
    return ProductGrid(MeasuredGrid(dict(zip(before.measured.grid.axes, axes, strict=True)), even, origin), waves)


def _at(of: MeasuredGrid, at: Sequence[Column]) -> NDArray[np.float64]:
    """Return a grid's logarithms at points."""
    return interpolate(of.log_axes, of.log_s, [np.log(side) for side in at])

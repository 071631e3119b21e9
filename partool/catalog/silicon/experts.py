"""Curves of measured layers of experts: seconds by rows per expert, at scattered sizes of experts.

A layer's seconds are stored relative to :func:`equation_s`, since the ratio changes slowly with every size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from partool.catalog.bandwidth import MEMORY_SHARE
from partool.catalog.silicon.grid import Origin, TableEntry, decoded, entries, stored

Column = Any
_START_S = 5e-6
"""Seconds to start a layer's kernels: an assumption, and too short by itself.

Layers whose products and transfers take less than 8 us by the other terms take 14 to 79 us more, 31 us in the median
of the kernels' medians (47 kernels on nine devices, 16 tokens or fewer), as a layer consists of several kernels.
Training's layers are longer, and curves hold ratios to this equation. Curves made with 26 us in its place meet model
shapes that were left out with a mean error of 11.5 % in the place of 12.3 % (medians of 16 tables in 16 bits on A100,
H100, H200 and B200): CUTLASS's are better by up to 6 percentage points, Triton's on B200 worse by up to 2. As devices
and kernels disagree, the value stays."""
_DISTANCES = (1.0, 1.0, 0.5)
"""Weight of a difference in the logarithm of hidden width, inner width and number of experts, in this order: curves
change least with the number of experts. Chosen on model shapes that were left out (``tests/silicon/judge_experts.py``).
"""
_NEAR = 1e-3
"""Squared distance below which a curve counts as the one that is asked for."""
_APART = 0.2
"""Distance in logarithms from the mean of all curves beyond which a curve's weight falls (Huber, "Robust Estimation of
a Location Parameter", 1964). Some models' curves are far from all others, where kernels were not tuned for their sizes
or one rank got most of the tokens. With model shapes left out, 76 of 79 tables have a smaller median error than with a
plain mean (10.9 instead of 11.8 % in the median over tables). More rounds of weights lower it further,
but make prices jump beside the sizes of such a model."""


class Rates(NamedTuple):
    """What a device reaches in large products and from its memory."""

    flops_per_s: float
    bytes_per_s: float


class Sizes(NamedTuple):
    """A layer of experts on one device."""

    each: Column
    """Rows per expert."""
    experts: Column
    """Experts on the device."""
    hidden: Column
    inner: Column
    """Inner width of one expert, or of the part of it that is on the device."""
    gated: bool = True

    @property
    def rows(self) -> Column:
        """Rows of all experts together."""
        return self.each * self.experts


class CurvesEntry(TableEntry):
    """One table of the family's JSON file."""

    flops_per_s: float
    bytes_per_s: float
    element_bytes: int
    gated: bool
    points: str
    """Name of the array that holds the sizes of the curves; tables with curves at the same sizes share it."""


def equation_s(sizes: Sizes, rates: Rates, weight_bytes: float, value_bytes: float = 2.0) -> Column:
    """Return the seconds of a layer of experts whose products and transfers all run at the device's best rates.

    Both products' FLOPs, the weights, and the rows: each row is copied into the experts' order, read, written by the
    second product and summed; inner values are written, read, multiplied and read. ``weight_bytes`` and
    ``value_bytes`` are bytes per element.
    """
    rows, matrices = sizes.rows, 2 + sizes.gated
    flops = 2.0 * matrices * rows * sizes.hidden * sizes.inner
    weights = weight_bytes * matrices * sizes.experts * sizes.hidden * sizes.inner
    moved = value_bytes * rows * (4.0 * sizes.hidden + (1.0 + matrices) * sizes.inner)
    return flops / rates.flops_per_s + (weights + moved) / (MEMORY_SHARE * rates.bytes_per_s) + _START_S


@dataclass(frozen=True)
class Curves:
    """Measured seconds relative to :func:`equation_s` along curves of rows per expert."""

    points: NDArray[np.float64]
    """Sizes of each curve [curves, 3]: hidden width, inner width, experts on the device."""
    each: NDArray[np.float64]
    """Rows per expert along all curves, ascending by a constant factor."""
    log_ratio: NDArray[np.float64]
    """Logarithm of the ratio [curves, len(each)]; beyond what was measured, that of the nearest measured rows."""
    rates: Rates
    """Rates with which the equation was computed."""
    element_bytes: int
    gated: bool
    origin: Origin

    @cached_property
    def _log_points(self) -> NDArray[np.float64]:
        logs: NDArray[np.float64] = np.log(self.points) * np.array(_DISTANCES)
        return logs

    @cached_property
    def _curves(self) -> dict[tuple[float, float, float], NDArray[np.float64]]:
        return {}

    def seconds(self, sizes: Sizes) -> Column:
        """Return the seconds of columns of layers; they grow with the rows.

        At sizes that were not measured, the ratio is a robust mean of all curves: weighted with the inverse fourth
        power of their distance in logarithms (Shepard, "A two-dimensional interpolation function", ACM 1968), and less
        where a curve is far from the others. ``sizes.gated`` is that of the table.
        """
        each, experts, hidden, inner = np.broadcast_arrays(*(np.asarray(part, float) for part in sizes[:4]))
        shape, columns = each.shape, [part.reshape(-1) for part in (hidden, inner, experts)]
        order = np.lexsort(columns)
        ordered = [part[order] for part in columns]
        starts = np.ones(len(order), bool)
        starts[1:] = np.any([part[1:] != part[:-1] for part in ordered], axis=0)
        where = np.empty(len(order), np.intp)
        where[order] = np.cumsum(starts) - 1
        points = zip(*(part[starts].tolist() for part in ordered), strict=True)
        nodes = np.array([self.log_seconds(point) for point in points])
        ends = np.clip(each, self.each[0], self.each[-1])
        low = np.clip(np.searchsorted(self.each, ends.reshape(-1), side="right") - 1, 0, len(self.each) - 2)
        at, log_each = np.log(ends.reshape(-1)), np.log(self.each)
        share = (at - log_each[low]) / (log_each[low + 1] - log_each[low])
        logs = (1.0 - share) * nodes[where, low] + share * nodes[where, low + 1]
        beyond = self._equation(each, experts, hidden, inner) / self._equation(ends, experts, hidden, inner)
        return (np.exp(logs).reshape(shape) * beyond)[()]

    def _equation(self, each: Column, experts: Column, hidden: Column, inner: Column) -> Column:
        return equation_s(Sizes(each, experts, hidden, inner, self.gated), self.rates, self.element_bytes)

    def log_seconds(self, point: tuple[float, float, float]) -> NDArray[np.float64]:
        """Return the logarithms of seconds at each of ``self.each`` for one size, which never fall."""
        logs = self._curves.get(point)
        if logs is None:
            hidden, inner, experts = point
            away = self._log_points - np.log(point) * np.array(_DISTANCES)
            weight = (np.sum(away * away, axis=1) + _NEAR) ** -2
            ratio = _robust_mean(weight, self.log_ratio)
            rising = np.log(self._equation(self.each, experts, hidden, inner)) + ratio
            logs = self._curves[point] = np.maximum.accumulate(rising)
        return logs

    def distance(self, point: tuple[float, float, float]) -> float:
        """Return the distance of a size from the nearest measured one, in logarithms."""
        away = self._log_points - np.log(point) * np.array(_DISTANCES)
        return float(np.sqrt(np.min(np.sum(away * away, axis=1))))


def _robust_mean(weight: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weighted mean of the rows of ``values``, in which rows that are far from it count less."""
    mean = weight @ values / np.sum(weight)
    share = weight[:, None] / np.maximum(np.abs(values - mean) / _APART, 1.0)
    robust: NDArray[np.float64] = np.sum(share * values, axis=0) / np.sum(share, axis=0)
    return robust


@cache
def curves(name: str) -> Curves | None:
    """Return a table of curves; None if there is none of this name."""
    entry = cast(CurvesEntry | None, entries("experts").get(name))
    if entry is None:
        return None
    return Curves(
        points=stored("experts", entry["points"]).astype(float),
        each=np.array(entry["axes"]["rows_per_expert"], float),
        log_ratio=decoded(stored("experts", name)),
        rates=Rates(entry["flops_per_s"], entry["bytes_per_s"]),
        element_bytes=entry["element_bytes"],
        gated=entry["gated"],
        origin=entry,
    )

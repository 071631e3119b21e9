"""Turns scattered measurements into complete, monotone grids of logarithms of seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ISOLATED = 1.5
"""Ratio to the neighbours from which a measurement is isolated."""


def cube(at: Sequence[Floats], seconds: Floats, axes: Sequence[Floats]) -> Floats:
    """Return logarithms of the seconds at all combinations of the axes' values; NaN where none was measured."""
    places, present = [], np.ones(len(seconds), dtype=bool)
    for column, axis in zip(at, axes, strict=True):
        place = np.minimum(np.searchsorted(axis, column), len(axis) - 1)
        present &= axis[place] == column
        places.append(place)
    filled = np.full([len(axis) for axis in axes], np.nan)
    filled[tuple(place[present] for place in places)] = np.log(seconds[present])
    return filled


def isolated(log_s: Floats, axes: Sequence[Floats]) -> NDArray[np.bool_]:
    """Return True where a measurement differs from its neighbours along all axes, to the same side."""
    above, below, judged = np.ones(log_s.shape, bool), np.ones(log_s.shape, bool), np.zeros(log_s.shape, int)
    for axis, values in enumerate(axes):
        residual = log_s - _between_neighbours(log_s, np.log(values), axis)
        present = np.isfinite(residual)
        above &= ~present | (residual > np.log(ISOLATED))
        below &= ~present | (residual < -np.log(ISOLATED))
        judged += present
    return (above | below) & (judged >= min(2, len(axes)))


def _between_neighbours(log_s: Floats, axis: Floats, along: int) -> Floats:
    """Return, for each entry, the value between its two neighbours on one axis; NaN at both ends."""
    values = np.moveaxis(log_s, along, 0)
    share = ((axis[1:-1] - axis[:-2]) / (axis[2:] - axis[:-2])).reshape(-1, *(1,) * (values.ndim - 1))
    between = np.full(values.shape, np.nan)
    between[1:-1] = values[:-2] * (1.0 - share) + values[2:] * share
    return np.moveaxis(between, 0, along)


def monotone(log_s: Floats) -> Floats:
    """Return the closest values, by squares, that never fall along the first axis (pool adjacent violators).

    The fit at t is the largest, over starts i <= t, of the least mean of the entries i to j >= t (Robertson, Wright and
    Dykstra, "Order Restricted Statistical Inference", 1988).
    """
    count = len(log_s)
    sums = np.concatenate([np.zeros((1, *log_s.shape[1:])), np.cumsum(log_s, axis=0)])
    fitted = np.full(log_s.shape, -np.inf)
    for start in range(count):
        means = np.stack([(sums[stop + 1] - sums[start]) / (stop + 1 - start) for stop in range(start, count)])
        least = np.minimum.accumulate(means[::-1], axis=0)[::-1]
        fitted[start:] = np.maximum(fitted[start:], least)
    return fitted


def completed(log_s: Floats, axes: Sequence[Floats]) -> Floats:
    """Return a grid without gaps, filled along its last axis and, where a line has no entry, along those before it.

    Between measured entries logarithms are interpolated; beyond them seconds grow in proportion to the coordinate.
    """
    filled = log_s.copy()
    for along in range(len(axes) - 1, -1, -1):
        axis = np.log(axes[along])
        lines = np.moveaxis(filled, along, -1)
        for place in np.argwhere(~np.isfinite(lines).all(axis=-1)):
            row = lines[tuple(place)]
            present = np.isfinite(row)
            if present.any():
                ends = np.clip(axis, axis[present][0], axis[present][-1])
                row[~present] = (np.interp(axis, axis[present], row[present]) + axis - ends)[~present]
    return filled

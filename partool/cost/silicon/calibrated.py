"""What rows that were measured on the user's machine change in prices.

A row takes the place of the price at its sizes. Around it, the price is multiplied by the ratio of measured to priced
seconds, interpolated between rows and held constant beyond the first and the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import Column
from partool.cost.silicon.origin import PriceOrigin

_LEAST_RISE = ((512.0, 0.3), (0.0, 0.1))
"""Length from which on seconds of attention rise with the length at least with a power; the tables of all devices have
0.34 from 512 tokens on and 0.15 from 128 on, where few heads leave most of a device idle."""
_NEAREST = 1e-12
"""Squared distance, in logarithms, below which a point is a row's."""


def here(date: str) -> str:
    """Return in words where a row comes from."""
    return f"this machine, {date}"


def at_row(place: str, ratios: Sequence[str]) -> PriceOrigin:
    """Return the origin of a row's price, which ``ratios`` change by what a short measurement cannot show."""
    return PriceOrigin("scaled" if ratios else "measured", "; ".join([place, *([", ".join(ratios)] if ratios else [])]))


def spread(rows: NDArray[np.float64], log_ratios: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithms of ratios at points: the mean over rows, weighted by the inverse squared distance.

    ``rows`` has the logarithms of a row's sizes, [rows, sides], and ``at`` those of points, [..., sides]. The mean at a
    row is the row's (Shepard, "A two-dimensional interpolation function for irregularly-spaced data", ACM 1968). A
    point beyond all rows along a side has the ratio of the nearest point between them.
    """
    nearest = np.clip(at, rows.min(axis=0), rows.max(axis=0))
    distance = ((nearest[..., None, :] - rows) ** 2).sum(axis=-1)
    weights = 1.0 / np.maximum(distance, _NEAREST)
    mean: NDArray[np.float64] = (weights * log_ratios).sum(axis=-1) / weights.sum(axis=-1)
    return mean


def pinned(log_s: NDArray[np.float64], rows: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return seconds that never fall along the first axis, with those at ``rows`` as they are.

    Rows that fall themselves meet in the middle between the largest one before and the smallest one after each.
    """
    low, high = _limits(np.where(rows, log_s, -np.inf), np.where(rows, log_s, np.inf))
    fixed = np.where(rows, 0.5 * (np.where(rows, low, 0.0) + np.where(rows, high, 0.0)), log_s)
    low, high = _limits(np.where(rows, fixed, -np.inf), np.where(rows, fixed, np.inf))
    between: NDArray[np.float64] = np.maximum.accumulate(np.clip(fixed, low, high), axis=0)
    return between


def _limits(least: NDArray[np.float64], most: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest entry up to each place and the smallest entry from it on, along the first axis."""
    return np.maximum.accumulate(least, axis=0), np.minimum.accumulate(most[::-1], axis=0)[::-1]


def merged_axes(
    axes: Sequence[NDArray[np.float64]], rows: NDArray[np.float64]
) -> tuple[list[NDArray[np.float64]], tuple[NDArray[np.intp], ...]]:
    """Return axes with the rows' sizes among their values, and the rows' places on them."""
    merged = [np.union1d(axis, side) for axis, side in zip(axes, rows.T, strict=True)]
    return merged, tuple(np.searchsorted(axis, side) for axis, side in zip(merged, rows.T, strict=True))


class LengthRatio(NamedTuple):
    """The ratio of measured to priced seconds of attention at one row."""

    length: float
    heads: float
    log_ratio: float


def by_length(rows: Sequence[LengthRatio], length: Column, heads: Column) -> Column:
    """Return the ratios of attention at lengths and numbers of heads.

    The ratio is linear, in logarithms, in the heads between the rows of one length, and in the length between lengths;
    beyond them it is constant. A ratio that falls faster with the length than seconds of attention rise is raised, so
    that seconds never fall.
    """
    length, heads = np.broadcast_arrays(*np.atleast_1d(np.log(length), np.log(heads)))
    knots = sorted({row.length for row in rows})
    ratios: list[NDArray[np.float64]] = []
    for index, knot in enumerate(knots):
        of_length = sorted((np.log(row.heads), row.log_ratio) for row in rows if row.length == knot)
        ratio = np.interp(heads, [each[0] for each in of_length], [each[1] for each in of_length])
        if index:
            fall = next(power for least, power in _LEAST_RISE if knots[index - 1] >= least)
            ratio = np.maximum(ratio, ratios[-1] - fall * np.log(knot / knots[index - 1]))
        ratios.append(ratio)
    at = ratios[0]
    for knot, after, ratio, further in zip(knots, knots[1:], ratios, ratios[1:], strict=False):
        share = np.clip((length - np.log(knot)) / np.log(after / knot), 0.0, 1.0)
        at = np.where(share > 0.0, ratio + share * (further - ratio), at)
    seconds: Column = np.exp(at) if at.size > 1 else float(np.exp(at[0]))
    return seconds

"""Grids of measured seconds: how they are stored beside this file, read, and interpolated.

A family of tables (``products``, ``attention``, ...) has two files: ``<family>.json`` says for each table what was
measured, by whom and at which points; ``<family>.npz`` has the seconds. ``tests/silicon`` makes both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

Family = Literal["products", "attention", "experts", "collectives"]
FAMILIES: tuple[Family, ...] = ("products", "attention", "experts", "collectives")

_FOLDER = Path(__file__).parent
STEP = 0.004
"""Steps of the stored logarithms of seconds, so that rounding changes a time by at most 0.2 %."""


class Origin(TypedDict):
    """Where a table comes from; every table of a family's JSON file has these fields beside its axes."""

    device: str
    """Catalog name of the device that was measured."""
    kernel: str
    framework: str
    """Name and version of the software that was measured."""
    source: str
    licence: str
    date: str
    rows: int
    """Number of measurements that the table was made of."""
    dropped: dict[str, int]
    """Reason → number of measurements that were left out."""


class TableEntry(Origin):
    """One table of a family's JSON file."""

    axes: dict[str, list[float]]


@dataclass(frozen=True)
class MeasuredGrid:
    """Seconds at all combinations of the axes' values."""

    axes: dict[str, NDArray[np.float64]]
    """Name of an axis → its values, positive and ascending."""
    log_s: NDArray[np.float64]
    """Natural logarithms of seconds; one dimension per axis, in the axes' order."""
    origin: Origin

    @cached_property
    def log_axes(self) -> list[NDArray[np.float64]]:
        """Return the logarithms of the axes' values."""
        return [np.log(values) for values in self.axes.values()]

    def seconds(self, *at: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the seconds at columns of points, one column per axis.

        Between the axes' values the logarithm of the seconds is linear in the logarithm of each coordinate; beyond the
        first and last value it is that at this value.
        """
        return np.exp(interpolate(self.log_axes, self.log_s, [np.log(column) for column in at]))

    def contains(self, *at: NDArray[np.float64] | float) -> NDArray[np.bool_]:
        """Return True where a point lies between the first and the last value of every axis."""
        inside = np.asarray(True)
        for column, values in zip(at, self.axes.values(), strict=True):
            inside = inside & (np.asarray(column) >= values[0]) & (np.asarray(column) <= values[-1])
        return inside

    def clipped(self, *at: NDArray[np.float64] | float) -> list[NDArray[np.float64]]:
        """Return the points of the grid's box that are nearest to ``at``, one column per axis."""
        return [
            np.clip(np.asarray(column, float), values[0], values[-1])
            for column, values in zip(at, self.axes.values(), strict=True)
        ]


def interpolate(
    axes: Sequence[NDArray[np.float64]], values: NDArray[np.float64], at: Sequence[NDArray[np.float64] | float]
) -> NDArray[np.float64]:
    """Return ``values`` at columns of points: linear along each axis between its entries, constant beyond them."""
    shares: list[NDArray[np.float64]] = []
    steps: list[int] = []
    place: NDArray[np.intp] | int = 0
    # Axes with one entry or a plain number are interpolated first and drop out, as columns cost more.
    for along in range(len(axes) - 1, -1, -1):
        if len(axes[along]) == 1:
            values = np.asarray(values.take(0, along))
        elif np.ndim(at[along]) == 0:
            values = _at_one(axes[along], values, float(at[along]), along)
    for axis, column in zip(axes, at, strict=True):
        if len(axis) > 1 and np.ndim(column):
            low = np.searchsorted(axis[1:-1], column, side="right")
            share = (column - axis[low]) / (axis[low + 1] - axis[low])
            shares.append(np.minimum(np.maximum(share, 0.0), 1.0))
            steps.append(values.strides[len(steps)] // values.itemsize)
            place = place + low * steps[-1]
    return _between(values.reshape(-1), place, steps, shares)


def _at_one(axis: NDArray[np.float64], values: NDArray[np.float64], at: float, along: int) -> NDArray[np.float64]:
    """Return ``values`` at one coordinate of an axis, which they then lack."""
    low = int(np.searchsorted(axis[1:-1], at, side="right"))
    share = min(max((at - axis[low]) / (axis[low + 1] - axis[low]), 0.0), 1.0)
    first, second = (np.asarray(values.take(place, along)) for place in (low, low + 1))
    between: NDArray[np.float64] = first + share * (second - first)
    return between


def _between(
    flat: NDArray[np.float64], place: NDArray[np.intp] | int, steps: list[int], shares: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return the values at ``place`` and one step further on each axis, weighted by the shares of the latter."""
    if not steps:
        return flat.take(place)
    first = _between(flat, place, steps[1:], shares[1:])
    second = _between(flat, place + steps[0], steps[1:], shares[1:])
    return first + shares[0] * (second - first)


@cache
def entries(family: Family) -> dict[str, TableEntry]:
    """Return a family's tables by name, without their seconds."""
    loaded: dict[str, TableEntry] = json.loads((_FOLDER / f"{family}.json").read_bytes())
    return loaded


@cache
def grid(family: Family, name: str) -> MeasuredGrid | None:
    """Return a table; None if the family has no table of this name."""
    entry = entries(family).get(name)
    if entry is None:
        return None
    axes = {axis: np.array(values, float) for axis, values in entry["axes"].items()}
    return MeasuredGrid(axes, decoded(stored(family, name)), entry)


def stored(family: Family, name: str) -> NDArray[np.int16]:
    """Return an array of a family's file of seconds as it is stored."""
    with np.load(_FOLDER / f"{family}.npz") as archive:
        steps: NDArray[np.int16] = archive[name.replace("/", "|")]
    return steps


def decoded(steps: NDArray[np.int16]) -> NDArray[np.float64]:
    """Return logarithms of seconds from stored steps: each is less the one before it on the last axis."""
    return np.ascontiguousarray(np.cumsum(steps.astype(np.int64), axis=-1) * STEP)


def family_hash(family: Family) -> str:
    """Return the SHA-256 of a family's two files, for ``Plan.inputs``."""
    digest = hashlib.sha256()
    for suffix in ("json", "npz"):
        digest.update((_FOLDER / f"{family}.{suffix}").read_bytes())
    return digest.hexdigest()

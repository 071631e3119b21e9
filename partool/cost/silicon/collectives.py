"""Seconds of collectives within a node from measured tables, and lower bounds of them that are convex in the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from partool.catalog.lookup import table
from partool.catalog.silicon.collectives import Operation, collectives, measured_device, seconds_by_rank
from partool.cost.case import Column
from partool.cost.silicon import calibrated
from partool.cost.silicon.origin import PriceOrigin
from partool.spec.hardware import Devices
from partool.spec.measured_rows import CollectiveRow

_SMALLEST = 10
"""Base-2 logarithm of the bytes from which on the curves of equations are tabulated."""
_SAME = 0.01
"""Difference of base-2 logarithms of bytes up to which a measured size counts as a power of two: calibrations measure
these, rounded down to a multiple of the ranks."""
_LARGEST = 46
"""Base-2 logarithm of the bytes up to which curves are tabulated: 64 TiB, more than any message."""


@dataclass(frozen=True)
class CollectiveCurves:
    """Seconds of one operation by number of ranks and bytes, at all powers of two from the smallest measured size.

    Smaller messages take the time of the smallest one; larger ones go at the rate of the largest measured one.
    """

    first: int
    """Base-2 logarithm of the smallest size."""
    seconds: NDArray[np.float64]
    """Array [ranks from 2 on, sizes]."""

    @cached_property
    def _log_s(self) -> NDArray[np.float64]:
        return np.log(self.seconds)

    @cached_property
    def _convex(self) -> NDArray[np.float64]:
        """Largest convex seconds below the curve from each size on: an array [ranks, first size, sizes].

        The curve is lowered first where its time per byte grows. Then each of its parts between two sizes lies above
        the chord, so that chords between sizes suffice, and what n messages of equal size take together grows with n.
        """
        bytes_ = 2.0 ** np.arange(self.first, self.first + self.seconds.shape[1])
        lowered = bytes_ * np.minimum.accumulate(self.seconds / bytes_, axis=1)
        count = len(bytes_)
        below = np.repeat(lowered[:, None, :], count, axis=1)
        rows = np.arange(len(lowered))
        for start in reversed(range(count - 1)):
            slopes = (lowered[:, start + 1 :] - lowered[:, start, None]) / (bytes_[start + 1 :] - bytes_[start])
            steps = np.argmin(slopes, axis=1)
            line = lowered[:, start, None] + slopes[rows, steps][:, None] * (bytes_ - bytes_[start])
            after = below[rows, start + 1 + steps]
            inside = np.arange(count) <= (start + 1 + steps)[:, None]
            below[:, start] = np.where(inside, line, after)
        return below

    def at(self, whole_bytes: Column, members: Column) -> Column:
        """Return the seconds, whose logarithm is linear in that of the bytes between two sizes."""
        place, low = self._places(whole_bytes)
        index, log_s = self._row(members) + low, self._log_s.reshape(-1)
        from_s = log_s.take(index)
        seconds: Column = np.exp(from_s + (place - low) * (log_s.take(index + 1) - from_s))
        return seconds

    def least(self, whole_bytes: Column, members: Column, at_least: Column) -> Column:
        """Return convex lower bounds of :meth:`at` for messages of ``at_least`` bytes or more."""
        _, low = self._places(whole_bytes)
        _, start = self._places(np.minimum(at_least, whole_bytes))
        share = np.maximum(whole_bytes * 2.0 ** -(self.first + low) - 1.0, 0.0)
        index, convex_s = (self._row(members) + start) * self.seconds.shape[1] + low, self._convex.reshape(-1)
        from_s = convex_s.take(index)
        seconds: Column = from_s + share * (convex_s.take(index + 1) - from_s)
        return seconds

    def seconds_of(self, whole_bytes: Column, members: Column, at_least: Column | None) -> Column:
        """Return :meth:`at`, or :meth:`least` with ``at_least``; 0 for one rank."""
        exact = self.at(whole_bytes, members) if at_least is None else self.least(whole_bytes, members, at_least)
        return np.where(np.asarray(members) > 1, exact, 0.0)

    def _places(self, whole_bytes: Column) -> tuple[Column, NDArray[np.intp]]:
        """Return the places of sizes among the tabulated ones, and those of the next smaller ones."""
        place = np.log2(np.maximum(whole_bytes, 2.0**self.first)) - self.first
        return place, np.minimum(np.asarray(place).astype(np.intp), self.seconds.shape[1] - 2)

    def _row(self, members: Column) -> NDArray[np.intp]:
        """Return the places of the rows of numbers of ranks in the flat array of seconds."""
        row: NDArray[np.intp] = np.maximum(np.asarray(members).astype(np.intp) - 2, 0) * self.seconds.shape[1]
        return row


def curves(devices: Devices, operation: Operation) -> CollectiveCurves | None:
    """Return the curves that price an operation within a node of these devices; None without a table.

    The table's device gives start times and rates; both are scaled by what the devices' own link says, so that a
    device that is priced by a relative, or a rate in a spec, has its share. Only names choose the table.
    """
    if devices.backend != "cuda" or devices.slice:
        return None
    device = measured_device(devices.accelerator, devices.measured_as)
    if not device or (devices.topology == "none") != (table("accelerators")[device]["topology"] == "none"):
        return None  # cards with bridges or switches between them send by other ways than those that were measured
    pair = devices.pair_bytes_per_s if devices.topology == "mesh" else None
    link = devices.link_latency_s, devices.link_bytes_per_s, pair
    return _curves(device, operation, most_ranks(devices), link, rows(devices, operation))


def most_ranks(devices: Devices) -> int:
    """Return the number of ranks up to which collectives have curves."""
    measured = devices.measured_rows.collectives if devices.measured_rows is not None else ()
    return max(devices.domain, devices.per_node, 2, *(row.ranks for row in measured))


def rows(devices: Devices, operation: Operation) -> tuple[CollectiveRow, ...]:
    """Return the collectives that were measured on the user's machine."""
    measured = devices.measured_rows
    return () if measured is None else tuple(row for row in measured.collectives if row.operation == operation)


def with_rows(curves_before: CollectiveCurves, measured: Sequence[CollectiveRow]) -> CollectiveCurves:
    """Return curves with the rows' seconds in the place of their own.

    All numbers of ranks take the ratio of measured to priced seconds, interpolated over the bytes. Seconds grow with
    bytes. Sizes are powers of two; a row between two of them is met as far as the curve between them can.
    """
    sizes = curves_before.first + np.arange(curves_before.seconds.shape[1])
    places = np.array([np.log2(row.whole_bytes) for row in measured])
    ratios = [np.log(row.seconds / float(curves_before.at(float(row.whole_bytes), row.ranks))) for row in measured]
    log_s = np.log(curves_before.seconds) + np.interp(sizes, places, ratios)
    is_row = np.zeros(log_s.shape, bool)
    for row, place in zip(measured, places, strict=True):
        nearest = round(place) - curves_before.first
        if 0 <= nearest < len(sizes) and abs(place - round(place)) < _SAME:
            is_row[row.ranks - 2, nearest] = True
    return CollectiveCurves(curves_before.first, np.exp(calibrated.pinned(log_s.T, is_row.T).T))


@lru_cache(maxsize=256)
def _curves(
    device: str,
    operation: Operation,
    most: int,
    link: tuple[float, float, float | None],
    measured_here: tuple[CollectiveRow, ...],
) -> CollectiveCurves | None:
    measured = collectives(device, operation)
    if measured is None:
        return None
    latency_s, link_bytes_per_s, pair_bytes_per_s = link
    entry = table("accelerators")[device]
    seconds = seconds_by_rank(measured, most)
    others = np.arange(1, len(seconds) + 1)
    # In a node whose devices are linked pairwise, a ring uses only the links between its members.
    ring_bytes_per_s = (
        link_bytes_per_s if pair_bytes_per_s is None else np.minimum(pair_bytes_per_s * others, link_bytes_per_s)
    )
    slower = (entry["link_gb_per_s"] * 1e9 / ring_bytes_per_s * np.ones(len(seconds)))[:, None]
    start_s = seconds[:, :1]
    seconds = latency_s / (entry["link_latency_us"] * 1e-6) * start_s + slower * (seconds - start_s)
    first = round(np.log2(measured.axes["bytes"][0]))
    beyond = 2.0 ** np.arange(1, _LARGEST - first - seconds.shape[1] + 1)
    before = CollectiveCurves(first, np.concatenate([seconds, seconds[:, -1:] * beyond], axis=1))
    return with_rows(before, measured_here) if measured_here else before


def equation_curves(
    equation: Callable[[Column, Column], Column], most: int, measured_here: tuple[CollectiveRow, ...]
) -> CollectiveCurves:
    """Return curves of rows and, around them, of an equation that gives the seconds of bytes and numbers of ranks."""
    sizes: NDArray[np.float64] = 2.0 ** np.arange(_SMALLEST, _LARGEST, dtype=np.float64)
    members = np.arange(2, most + 1, dtype=np.float64)
    seconds = np.asarray(equation(sizes[None, :], members[:, None]))
    return with_rows(CollectiveCurves(_SMALLEST, seconds), measured_here)


def seconds(
    devices: Devices, operation: Operation, whole_bytes: Column, members: Column, at_least: Column | None = None
) -> Column | None:
    """Return the seconds of a collective of ``members`` ranks of one node; None if no table prices these devices.

    ``whole_bytes`` is the size of the whole tensor, in an all-to-all what each rank holds for all members together.
    With ``at_least``, the result is a lower bound for messages of at least this size, and convex in the bytes.
    """
    measured = curves(devices, operation)
    return None if measured is None else measured.seconds_of(whole_bytes, members, at_least)


def origin(devices: Devices, operation: Operation, members: int) -> PriceOrigin:
    """Return where the price of a collective of ``members`` ranks within a node comes from."""
    price, measured = _table_origin(devices, operation, members), rows(devices, operation)
    if devices.measured_rows is None or not measured:
        return price
    here = calibrated.here(devices.measured_rows.date)
    if members == measured[0].ranks:
        sizes = f"{measured[0].whole_bytes:,} to {measured[-1].whole_bytes:,} bytes"
        return PriceOrigin(
            "measured", f"{operation} on {here}, at {len(measured)} sizes of {sizes}; along {price.text}"
        )
    return PriceOrigin("scaled", f"{price.text}; by {operation} of {measured[0].ranks} ranks of {here}")


def _table_origin(devices: Devices, operation: Operation, members: int) -> PriceOrigin:
    device = measured_device(devices.accelerator, devices.measured_as)
    measured = collectives(device, operation) if device and curves(devices, operation) is not None else None
    if measured is None:
        return PriceOrigin("assumed", "start time and bytes / rate of the link")
    text = f"{operation} by {measured.origin['framework']} on {device}, {measured.origin['source']}"
    entry = table("accelerators")[device]
    link = (entry["link_latency_us"] * 1e-6, entry["link_gb_per_s"] * 1e9)
    if not np.allclose((devices.link_latency_s, devices.link_bytes_per_s), link):
        return PriceOrigin("scaled", f"{text}; scaled to the link's start and rate")
    most = int(measured.axes["ranks"][-1])
    if members > most and devices.topology == "none":
        return PriceOrigin("scaled", f"{text}; {members} cards share the lanes of {most}")
    if device != devices.accelerator or members > most:
        return PriceOrigin("scaled", text)
    return PriceOrigin("measured" if members in measured.axes["ranks"] else "interpolated", text)

"""The rows of a calibration that take the place of prices: products, attention, collectives."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator

from partool.catalog.profile_file import Measurement, Profile
from partool.spec.hardware import Devices
from partool.spec.measured_rows import AttentionRow, CollectiveRow, MeasuredRows, ProductRow

_FEWEST = 2
"""Rows of a kind from which prices are interpolated; one row scales as the machine's rates do."""


def measured_rows(profile: Profile, devices: Devices, precision: str, given: Collection[str]) -> MeasuredRows | None:
    """Return the rows of a profile that price these devices; None if there are none.

    ``given`` names fields of the devices that the spec gives: rows that would contradict them are left out. Ranks of a
    CPU share its cores, so their kernels take longer the more ranks there are.
    """
    longer = devices.per_node / profile.machine.ranks if devices.backend == "cpu" else 1.0
    wide = "bf16" if precision == "fp8" else precision
    products: list[ProductRow] = []
    if not {"achievable_flops", "memory_bytes_per_s"} & set(given):
        products += _products(profile, precision, longer, wide=False)
    if precision == "fp8" and not {"wide_flops", "memory_bytes_per_s"} & set(given):
        products += _products(profile, wide, longer, wide=True)
    attention = [
        AttentionRow(length=length, heads=batch * heads, width=width, seconds=longer * seconds)
        for (batch, heads, length, width), seconds in _medians(profile, "attention", wide)
        if "attention_flops" not in given
    ]
    collectives: list[CollectiveRow] = []
    if not {"link_bytes_per_s", "link_latency_s", "pair_bytes_per_s"} & set(given) and profile.machine.ranks > 1:
        collectives += _collectives(profile)
    attention = attention if len(attention) >= _FEWEST else []
    if not (products or attention or collectives):
        return None
    return MeasuredRows(
        date=profile.created[:10],
        products=tuple(products),
        attention=tuple(attention),
        collectives=tuple(collectives),
    )


def _products(profile: Profile, precision: str, longer: float, *, wide: bool) -> list[ProductRow]:
    rows = [
        ProductRow(wide=wide, m=m, n=n, k=k, seconds=longer * seconds)
        for (m, n, k), seconds in _medians(profile, "gemm", precision)
    ]
    return rows if len(rows) >= _FEWEST else []


def _collectives(profile: Profile) -> Iterator[CollectiveRow]:
    by_operation: dict[str, list[Measurement]] = defaultdict(list)
    for one in profile.measurements:
        if one.kind == "collective" and one.sides and one.seconds > 0:
            by_operation[one.name.split()[0]].append(one)
    for operation, measured in by_operation.items():
        if len(measured) >= _FEWEST:
            for one in sorted(measured, key=lambda one: one.sides):
                yield CollectiveRow(
                    operation=operation, ranks=profile.machine.ranks, whole_bytes=one.sides[0], seconds=one.seconds
                )


def _medians(profile: Profile, kind: str, precision: str) -> list[tuple[tuple[int, ...], float]]:
    """Return the seconds of each size of a kind, the median where a size was measured several times."""
    by_sides: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for one in profile.measurements:
        if one.kind == kind and one.precision == precision and one.sides and one.seconds > 0:
            by_sides[one.sides].append(one.seconds)
    return sorted((sides, statistics.median(seconds)) for sides, seconds in by_sides.items())

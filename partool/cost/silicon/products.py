"""Seconds of matrix products from tables of measured kernels (``partool/catalog/silicon/products``).

A table has the seconds of products [m, k] × [k, n] on one device. On the device that was measured, in the catalog's
rates, a price is the table's; otherwise the table is scaled by the ratios of both devices' rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partool.catalog.lookup import table as catalog
from partool.catalog.silicon.grid import MeasuredGrid, entries, grid, interpolate
from partool.catalog.silicon.products import ProductGrid, product_grid
from partool.cost.case import Column
from partool.cost.silicon.origin import PriceOrigin
from partool.work.base import Workload

_MEMORY_SHARE = 0.85
"""Share of the memory bandwidth that streaming kernels reach."""
_START_S = 2.8e-6
"""Start of a kernel, in products beyond the tables' sizes."""
_MULTIPLE = 16
"""Products whose m is a multiple of this number, and products with other m, follow different curves."""
_LARGE = (4096.0, 16384.0)
"""Least and greatest n and k of the products whose median rate counts as that of large products; m is at least the
first number."""
TRANSPOSED = 1.0
"""Ratio of the seconds of a product for weights' gradients, whose operands are transposed, to those of a linear layer
of the same sides. Only linear layers were measured; cuBLAS has kernels for all orders of operands."""
_ENGINE = {"linear": 1.0, "transformer-engine": 1.0}
"""``Stack.product_kernel`` → ratio to the measured torch linear layers: both call cuBLAS."""
_TABLES: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16/linear", "bf16/aiter"),
    "scaled_mm": ("fp8/scaled_mm", "fp8/aiter", "fp8_block/aiter"),
    "block": ("fp8_block/deepgemm", "fp8_block/trtllm", "fp8_block/aiter", "fp8/scaled_mm", "fp8/aiter"),
}
"""bf16, or ``Stack.fp8_kernel`` → its tables, the best first. Devices without the first have the next one's price."""
_NOTEWORTHY = 0.005
"""Least relative difference from a table that makes a price a scaled one."""
MEASURED_WIDTHS = 32
"""The widths of measured products are multiples of this number."""
_QUANTISING = ("fp8/scaled_mm", "fp8_block/deepgemm", "fp8_block/trtllm")
"""Tables whose products contain the quantisation of their input, other than the computation of its scale."""


class _Rates(NamedTuple):
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class ProductTable:
    """A table of seconds, and what turns them into a device's."""

    name: str
    measured: ProductGrid
    unaligned: MeasuredGrid | None
    """Logarithms of the ratios by which products with other m than multiples of 16 take longer."""
    large: _Rates
    """FLOP/s of the table's large products, and bytes per second of streaming kernels on the measured device."""
    element_bytes: float
    ratio: float
    """Ratio by which the whole table is scaled."""
    flop_s: float
    """Seconds per FLOP that are added."""
    byte_s: float
    """Seconds per byte that are added."""

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


def product_table(job: Workload, *, wide: bool = False) -> ProductTable | None:
    """Return the table that prices a workload's products; None if the device or the precision was not measured.

    Under fp8, ``wide`` products use 16 bits.
    """
    key = f"product table{' wide' if wide else ''}"
    if key not in job.memo:
        job.memo[key] = _made(job, wide=wide)
    made: ProductTable | None = job.memo[key]
    return made


def _made(job: Workload, *, wide: bool) -> ProductTable | None:
    devices, narrow = job.devices, job.precision == "fp8" and not wide
    if not devices.measured_as or not devices.units or job.precision not in ("bf16", "fp16", "fp8"):
        return None
    kernel = job.stack.fp8_kernel if narrow else "bf16"
    names = (f"{devices.measured_as}/{suffix}" for suffix in _TABLES[kernel])
    name = next((name for name in names if name in entries("products")), None)
    if name is None:
        return None
    measured = product_grid(name)
    assert measured is not None
    reference, large = _catalog_rates(devices.measured_as, "fp8" if narrow else "bf16"), _large_flops_per_s(name)
    flops_per_s = devices.wide_flops if wide and devices.wide_flops else devices.achievable_flops
    compute = reference.flops_per_s / flops_per_s
    memory = reference.bytes_per_s / devices.memory_bytes_per_s
    least = min(compute, memory)
    # Short measurements run at clocks that a power limit does not allow over a whole step: large products take
    # the time that they take at the sustained rate, in the median.
    sustained = max(1.0 / (devices.sustained_share * flops_per_s) - compute / large, 0.0)
    bytes_per_s = _MEMORY_SHARE * reference.bytes_per_s
    return ProductTable(
        name=name,
        measured=measured,
        unaligned=grid("products", f"{name}/unaligned"),
        large=_Rates(large, bytes_per_s),
        element_bytes=1.0 if narrow else 2.0,
        ratio=least * _ENGINE[job.stack.product_kernel],
        flop_s=(compute - least) / large + sustained,
        byte_s=(memory - least) / bytes_per_s,
    )


def _catalog_rates(device: str, precision: str) -> _Rates:
    entry: dict[str, Any] = catalog("accelerators")[device]
    return _Rates(entry["achievable_tflops"][precision] * 1e12, entry["memory_gb_per_s"] * 1e9)


@cache
def _large_flops_per_s(name: str) -> float:
    """Return the median rate of a table's large products."""
    of = product_grid(name)
    assert of is not None
    m, n, k = np.meshgrid(*of.grid.axes.values(), indexing="ij")
    large = (m >= _LARGE[0]) & (n >= _LARGE[0]) & (n <= _LARGE[1]) & (k >= _LARGE[0]) & (k <= _LARGE[1])
    rates = np.sort(2.0 * (m * n * k)[large] / np.exp(of.log_s(m[large], n[large], k[large])))
    return float(rates[len(rates) // 2])


def _at(of: MeasuredGrid, at: Sequence[Column]) -> NDArray[np.float64]:
    """Return a grid's logarithms at points."""
    return interpolate(of.log_axes, of.log_s, [np.log(side) for side in at])


def quantises(job: Workload) -> bool:
    """Return True if the price of an fp8 product contains the quantisation of its input."""
    of = product_table(job)
    return job.precision == "fp8" and of is not None and of.name.endswith(_QUANTISING)


def scale_s(job: Workload, m: Column, k: Column) -> Column:
    """Return the seconds in which the scale of an fp8 input [m, k] is computed, beside its product; 0 by block."""
    of = grid("products", f"{job.devices.measured_as}/fp8/scale") if quantises(job) else None
    if of is None or job.stack.fp8_kernel == "block":
        return 0.0
    memory = _catalog_rates(job.devices.measured_as, "fp8").bytes_per_s / job.devices.memory_bytes_per_s
    at = [np.maximum(m, 1.0), np.maximum(k, 1.0)]
    inside = of.clipped(*at)
    return memory * of.seconds(*inside) * np.maximum(at[0] * at[1] / (inside[0] * inside[1]), 1.0)


def origin(job: Workload, m: float, n: float, k: float, *, wide: bool = False, batch: float = 1) -> PriceOrigin:
    """Return where the price of ``batch`` products [m, k] × [k, n] comes from."""
    of = product_table(job, wide=wide)
    if of is None:
        return PriceOrigin("assumed", f"equations with the rates of {job.devices.accelerator}")
    measured = of.measured.grid.origin
    who = f"{measured['kernel']} on {measured['device']}, {measured['framework']}"
    ratios = _ratios(job, of, (m, n, k), batch)
    if ratios:
        return PriceOrigin("scaled", f"{who}; {', '.join(ratios)}")
    # Of sparse tables (AMD's), not every point of the grid was measured.
    at_point = all(side in values for side, values in zip((m, n, k), of.measured.grid.axes.values(), strict=True))
    return PriceOrigin("measured" if at_point and of.unaligned is not None else "interpolated", who)


def _ratios(job: Workload, of: ProductTable, sides: tuple[float, float, float], batch: float) -> list[str]:
    """Return in words why a price is not the table's."""
    words, devices = [], job.devices
    if not of.measured.grid.contains(*sides):
        words.append("beyond its sizes in proportion to FLOPs and bytes")
    more = float(of.seconds(*sides) / replace(of, ratio=1.0, flop_s=0.0, byte_s=0.0).seconds(*sides))
    if abs(more - 1.0) >= _NOTEWORTHY:
        clocks = devices.accelerator == devices.measured_as and of.ratio == 1.0
        words.append(
            f"× {more:.2f} for {'clocks over a whole step' if clocks else f'the rates of {devices.accelerator}'}"
        )
    if any(side % MEASURED_WIDTHS for side in sides[1:]):
        words.append("misaligned widths by the equations")
    if batch != 1:
        words.append(f"{batch:g} at once by the equations")
    if job.stack.product_kernel != "linear" and of.name.endswith("/linear"):
        words.append(f"as {job.stack.product_kernel}, × {_ENGINE[job.stack.product_kernel]:g}")
    if job.precision == "fp16":
        words.append("fp16 as bf16")
    return words

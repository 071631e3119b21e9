"""Seconds of matrix products from tables of measured kernels (``partool/catalog/silicon/products``).

A table has the seconds of products [m, k] × [k, n] on one device. On the device that was measured, in the catalog's
rates, a price is the table's; otherwise the table is scaled by the ratios of both devices' rates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from partool.catalog.bandwidth import MEMORY_SHARE
from partool.catalog.lookup import table as catalog
from partool.catalog.silicon.grid import entries, grid
from partool.catalog.silicon.products import product_grid
from partool.cost.case import Column
from partool.cost.silicon import calibrated
from partool.cost.silicon.origin import PriceOrigin
from partool.cost.silicon.product_grid import ProductTable, TableRates, equation_table, with_rows
from partool.spec.measured_rows import ProductRow
from partool.work.base import Workload

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
EQUATION_WIDTHS = 64
"""The widths of products whose equation has no cost of misaligned rows are multiples of this number."""
_QUANTISING = ("fp8/scaled_mm", "fp8_block/deepgemm", "fp8_block/trtllm")
"""Tables whose products contain the quantisation of their input, other than the computation of its scale."""


class JobEquation(Protocol):
    """Seconds of a workload's products [m, k] × [k, n]."""

    def __call__(self, job: Workload, m: Column, n: Column, k: Column, *, wide: bool) -> Column:
        """Return the seconds."""


def product_table(job: Workload, *, wide: bool = False) -> ProductTable | None:
    """Return the table that prices a workload's products; None if the device or the precision was not measured.

    Rows that were measured on the user's machine take the place of the table's. Under fp8, ``wide`` products use 16
    bits.
    """
    key = f"product table{' wide' if wide else ''}"
    if key not in job.memo:
        made = _made(job, wide=wide)
        rows = _rows(job, wide=wide, multiple=MEASURED_WIDTHS)
        # A calibration measures fp8 products without the quantisation of their input, which some tables contain.
        narrow = job.precision == "fp8" and not wide and made is not None and made.name.endswith(_QUANTISING)
        if made is not None and len(rows) > 1 and not narrow:
            made = with_rows(made, rows, _ENGINE[job.stack.product_kernel])
        job.memo[key] = made
    table: ProductTable | None = job.memo[key]
    return table


def priced_table(job: Workload, equation: JobEquation, *, wide: bool = False) -> ProductTable | None:
    """Return the table of :func:`product_table`, or on accelerators that have none one of the user's rows.

    ``equation`` gives the seconds around these rows. The result is None where nothing was measured: plans then take
    the equation. On a CPU they do so with rows, too, as a calibration draws its line through all of them.
    """
    table = product_table(job, wide=wide)
    if table is not None or job.devices.measured_rows is None or not job.devices.units:
        return table
    key = f"product rows{' wide' if wide else ''}"
    if key not in job.memo:
        job.memo[key] = _row_table(job, equation, wide=wide)
    rows: ProductTable | None = job.memo[key]
    return rows


def _row_table(job: Workload, equation: JobEquation, *, wide: bool) -> ProductTable | None:
    rows, devices = _rows(job, wide=wide, multiple=EQUATION_WIDTHS), job.devices
    if len(rows) < 2:
        return None
    flops_per_s = devices.wide_flops if wide and devices.wide_flops else devices.achievable_flops
    steady = replace(job, devices=devices.model_copy(update={"sustained_share": 1.0}))
    return equation_table(
        partial(equation, steady, wide=wide), rows, TableRates(flops_per_s, MEMORY_SHARE * devices.memory_bytes_per_s),
        job.compute_bytes, (1.0 / devices.sustained_share - 1.0) / flops_per_s,
    )  # fmt: skip


def _rows(job: Workload, *, wide: bool, multiple: int) -> tuple[ProductRow, ...]:
    """Return the products of widths of a multiple that were measured on this machine."""
    measured = job.devices.measured_rows
    of_kind = () if measured is None else measured.products
    of_kind = tuple(row for row in of_kind if row.wide is (wide and job.precision == "fp8"))
    return tuple(row for row in of_kind if row.n % multiple == 0 and row.k % multiple == 0)


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
    bytes_per_s = MEMORY_SHARE * reference.bytes_per_s
    return ProductTable(
        name=name,
        measured=measured,
        unaligned=grid("products", f"{name}/unaligned"),
        large=TableRates(large, bytes_per_s),
        element_bytes=1.0 if narrow else 2.0,
        ratio=least * _ENGINE[job.stack.product_kernel],
        flop_s=(compute - least) / large + sustained,
        clocks_flop_s=sustained,
        byte_s=(memory - least) / bytes_per_s,
    )


def _catalog_rates(device: str, precision: str) -> TableRates:
    entry: dict[str, Any] = catalog("accelerators")[device]
    return TableRates(entry["achievable_tflops"][precision] * 1e12, entry["memory_gb_per_s"] * 1e9)


@cache
def _large_flops_per_s(name: str) -> float:
    """Return the median rate of a table's large products."""
    of = product_grid(name)
    assert of is not None
    m, n, k = np.meshgrid(*of.grid.axes.values(), indexing="ij")
    large = (m >= _LARGE[0]) & (n >= _LARGE[0]) & (n <= _LARGE[1]) & (k >= _LARGE[0]) & (k <= _LARGE[1])
    rates = np.sort(2.0 * (m * n * k)[large] / np.exp(of.log_s(m[large], n[large], k[large])))
    return float(rates[len(rates) // 2])


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


def origin(
    job: Workload,
    m: float,
    n: float,
    k: float,
    *,
    wide: bool = False,
    batch: float = 1,
    equation: JobEquation | None = None,
) -> PriceOrigin:
    """Return where the price of ``batch`` products [m, k] × [k, n] comes from.

    ``equation`` is that of :func:`priced_table`; without it devices that have no table have no rows either.
    """
    of = product_table(job, wide=wide) if equation is None else priced_table(job, equation, wide=wide)
    who = f"equations with the rates of {job.devices.accelerator}"
    if of is None:
        return PriceOrigin("assumed", who)
    measured = of.measured.grid.origin
    if of.name:
        who = f"{measured['kernel']} on {measured['device']}, {measured['framework']}"
    ratios = _ratios(job, of, (m, n, k), batch)
    if of.before is not None:
        return _calibrated_origin(job, of, (m, n, k), ratios, who)
    if ratios:
        return PriceOrigin("scaled", f"{who}; {', '.join(ratios)}")
    # Of sparse tables (AMD's), not every point of the grid was measured.
    at_point = all(side in values for side, values in zip((m, n, k), of.measured.grid.axes.values(), strict=True))
    return PriceOrigin("measured" if at_point and of.unaligned is not None else "interpolated", who)


def _calibrated_origin(
    job: Workload, of: ProductTable, sides: tuple[float, float, float], ratios: list[str], who: str
) -> PriceOrigin:
    """Return the origin of a price of a table with rows of the user's machine."""
    rows = job.devices.measured_rows
    assert rows is not None
    here = calibrated.here(rows.date)
    if sides in of.rows:
        return calibrated.at_row(here, ratios)
    least, most = (bound(list(of.rows), axis=0) for bound in (np.min, np.max))
    inside = np.all((least <= sides) & (np.asarray(sides) <= most))
    if inside and not ratios:
        return PriceOrigin("interpolated", f"between products of {here}, along {who}")
    assert of.before is not None
    more = float(replace(of, flop_s=0.0).seconds(*sides) / of.before.seconds(*sides))
    return PriceOrigin("scaled", f"{who}; {', '.join([f'× {more:.2f} by the nearest products of {here}', *ratios])}")


def _ratios(job: Workload, of: ProductTable, sides: tuple[float, float, float], batch: float) -> list[str]:
    """Return in words why a price is not the table's."""
    words, devices = [], job.devices
    if not of.measured.grid.contains(*sides):
        words.append("beyond its sizes in proportion to FLOPs and bytes")
    more = float(of.seconds(*sides) / replace(of, ratio=1.0, flop_s=0.0, byte_s=0.0).seconds(*sides))
    if abs(more - 1.0) >= _NOTEWORTHY:
        clocks = of.flop_s == of.clocks_flop_s and of.ratio == 1.0 and not of.byte_s
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

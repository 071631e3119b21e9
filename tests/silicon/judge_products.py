"""Judges tables of products: predicted against measured seconds of rows that the tables do not contain.

Run ``PYTHONPATH=tests python -m silicon.judge_products`` where the measurements are; it writes
``tests/bench/results/silicon_products.json`` and the committed sample ``tests/data/silicon/products.csv.gz``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from silicon import products, products_amd
from silicon.products_fit import Floats

from partool.catalog.hardware import resolve_hardware
from partool.catalog.silicon.grid import MeasuredGrid, entries
from partool.catalog.silicon.products import ProductGrid, Waves
from partool.cost.silicon.products import product_table
from partool.cost.time.gemm import equations_s
from partool.spec.hardware import HardwareSpec
from partool.spec.model import ModelConfig
from partool.spec.training import Precision
from partool.work.base import Workload
from partool.work.stacks import PARTOOL

RESULTS = Path(__file__).parents[1] / "bench/results/silicon_products.json"
SAMPLE = Path(__file__).parents[1] / "data/silicon/products.csv.gz"
SEED = 50
LEAST_M, LEAST_SIDE = 1024.0, 512.0
"""Rows with smaller sizes count as small; bars hold for the others."""
BARS = {
    "bf16/linear": {"m": (6, 16), "n": (6, 16), "k": (4, 12), "pairs": (4, 12)},
    "fp8/scaled_mm": dict.fromkeys(("m", "n", "k", "pairs"), (6, 17)),
    "fp8_block/deepgemm": dict.fromkeys(("m", "n", "k", "pairs"), (10, 38)),
    "fp8_block/trtllm": dict.fromkeys(("m", "n", "k", "pairs"), (6, 18)),
    "aiter": {"m": (5, 25)},
}
"""Median and 90th percentile of errors in per cent, by table and by what was left out."""
_MODEL = ModelConfig(layers=2, hidden=8, ffn_hidden=12, heads=4, kv_heads=2, head_dim=2, vocab=24)

Errors = NDArray[np.float64]


def workload(device: str, table: str) -> Workload:
    """Return a workload on a device of the catalog, in the precision of a table.

    Measurements are short, so that no power limit lowers the clocks of these devices.
    """
    precision: Precision = "bf16" if table.startswith("bf16") else "fp8"
    stack = replace(PARTOOL, fp8_kernel="block" if table.startswith("fp8_block") else "scaled_mm")
    devices = resolve_hardware(HardwareSpec(accelerator=device, nodes=1), precision).devices
    assert devices is not None
    devices = devices.model_copy(update={"sustained_share": 1.0})
    return Workload(_MODEL, devices, sequence_length=4096, precision=precision, stack=stack)


def figures(ratios: Errors) -> dict[str, float]:
    """Return the number of rows, and in per cent the median and 90th percentile of errors and the median ratio."""
    ratios = ratios[np.isfinite(ratios)]
    errors = 100.0 * np.abs(ratios - 1.0)
    return {
        "rows": len(ratios),
        "median": round(float(np.median(errors)), 1),
        "p90": round(float(np.quantile(errors, 0.9)), 1),
        "ratio": round(float(np.median(ratios)), 3),
    }


def large(ms: Floats, ns: Floats, ks: Floats) -> NDArray[np.bool_]:
    """Return True at combinations of sides that bars hold for."""
    return (ms >= LEAST_M)[:, None, None] & (ns >= LEAST_SIDE)[:, None] & (ks >= LEAST_SIDE)


def off_grid(device: str, table: str, ms: Floats, *, every: bool = False) -> tuple[list[Floats], Errors, Errors]:
    """Return points that are not a shipped table's, their measured seconds, and the shipped table's seconds.

    Measurements of the table's frameworks are repeats, whose median counts.
    """
    rows, _ = products.of_kernel(device, table)
    sides = products.sides_of(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        log_s = np.nanmedian(np.stack([one.cube(ms, sides) for one in rows]), axis=0)
    present = np.isfinite(log_s) & (True if every else large(ms, sides, sides))
    at = [column[present] for column in np.meshgrid(ms, sides, sides, indexing="ij")]
    return at, np.exp(log_s[present]), table_s(device, table, *at)


def table_s(device: str, table: str, m: Any, n: Any, k: Any) -> Any:
    """Return the seconds of a shipped table alone."""
    priced = product_table(workload(device, table))
    assert priced is not None
    assert priced.name == f"{device}/{table}"
    return priced.seconds(m, n, k) - priced.flop_s * (2.0 * m * n * k)


ABSENT = products.ALIGNED[~np.isin(products.ALIGNED, products.SHIPPED)]
"""Aligned m of measured rows that shipped tables do not have."""
ABSENT_UNALIGNED = np.array([1281, 1793, 2305, 2561, 2817, 3329, 3585, 3841, 4353], float)
"""Unaligned m of at least ``LEAST_M`` that the tables of ratios do not have."""


def shipped(device: str, table: str) -> dict[str, Any]:
    """Return the errors of a shipped table and of the equations on rows that are not the table's points."""
    at, measured, predicted = off_grid(device, table, ABSENT)
    _, unaligned, unaligned_s = off_grid(device, table, ABSENT_UNALIGNED)
    small_at, small, small_s = off_grid(device, table, ABSENT, every=True)
    few = (small_at[0] < LEAST_M) | (small_at[1] < LEAST_SIDE) | (small_at[2] < LEAST_SIDE)
    return {
        "aligned m": figures(predicted / measured),
        "unaligned m": figures(unaligned_s / unaligned),
        "small": figures((small_s / small)[few]),
        "equations": figures(equations_s(workload(device, table), *at) / measured),
        "quantiles": quantiles(predicted / measured),
    }


def quantiles(ratios: Errors) -> list[float]:
    """Return the 5th, 25th, 50th, 75th and 95th percentile."""
    return [round(float(each), 3) for each in np.quantile(ratios, (0.05, 0.25, 0.5, 0.75, 0.95))]


def left_out(
    rows: Sequence[products.Measured], side: str, values: Sequence[float], following: Waves | None = None
) -> Errors:
    """Return predicted / measured at sizes of one side, by tables that are made without the size, one at a time.

    The tables' seconds follow the waves ``following`` between their points.
    """
    sides = products.sides_of(rows)
    axes = {"m": products.ALIGNED, "n": sides, "k": sides}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        truth = np.nanmedian(np.stack([one.cube(products.ALIGNED, sides) for one in rows]), axis=0)
    along, ratios = "mnk".index(side), []
    counted = large(*axes.values())
    for value in values:
        place = int(np.searchsorted(axes[side], value))
        # Neighbours on the other two axes do not enter: a table of this size's two neighbours is enough.
        kept = axes | {side: axes[side][[place - 1, place + 1]]}
        if side == "m":
            kept = axes | {"m": np.delete(axes["m"], place)}
        made = products.distil(rows, *kept.values(), following)
        one = ProductGrid(MeasuredGrid(kept, made.log_s, {}), following)  # type: ignore[arg-type]
        at = np.meshgrid(*(axes | {side: np.array([value])}).values(), indexing="ij")
        ratio = np.exp(one.log_s(*at) - truth.take([place], along))
        ratios.append(ratio[counted.take([place], along)])
    return np.concatenate(ratios)


def pairs_left_out(rows: Sequence[products.Measured], places: Sequence[tuple[int, int]]) -> Errors:
    """Return predicted / measured for pairs (n, k), by tables in which each pair is filled in from the others.

    An entry without measurements is interpolated along k, as in the shipped tables.
    """
    sides, ms = products.sides_of(rows), products.ALIGNED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        truth = np.nanmedian(np.stack([one.cube(ms, sides) for one in rows]), axis=0)
    ratios = []
    for n, k in places:
        local = [*range(max(k - 1, 0), min(k + 2, len(sides)))]
        without = truth[:, n : n + 1, local].copy()
        without[:, :, local.index(k)] = np.nan
        made = products.monotone(products.completed(without, (ms, sides[n : n + 1], sides[local])))
        ratios.append(np.exp(made[:, 0, local.index(k)] - truth[:, n, k])[ms >= LEAST_M])
    return np.concatenate(ratios)


def by_side(rows: Sequence[products.Measured], following: Waves | None, step: int = 1) -> dict[str, dict[str, float]]:
    """Return errors with each inner size of each side left out in turn; ``step`` > 1 leaves out every step-th only."""
    sides = products.sides_of(rows)
    wide = sides[(sides >= LEAST_SIDE) & (sides < sides[-1])]
    inner = products.ALIGNED[(products.ALIGNED >= LEAST_M) & (products.ALIGNED[-1] > products.ALIGNED)]
    at = [int(place) for place in np.flatnonzero(np.isin(sides, wide))]
    return {
        "m": figures(left_out(rows, "m", inner[::step], following)),
        "n": figures(left_out(rows, "n", wide[::step], following)),
        "k": figures(left_out(rows, "k", wide[::step], following)),
        "pairs": figures(pairs_left_out(rows, [(n, k) for n in at for k in at][:: step * 3])),
    }


def spread(rows: Sequence[products.Measured]) -> dict[str, dict[str, float]]:
    """Return how far the frameworks of a table are apart on the same large products."""
    sides, apart = products.sides_of(rows), {}
    cubes = [one.cube(products.ALIGNED, sides)[large(products.ALIGNED, sides, sides)] for one in rows]
    for (first, one), (second, other) in combinations(zip(rows, cubes, strict=True), 2):
        apart[f"{first.framework} - {second.framework}"] = figures(np.exp(other - one))
    return apart


def amd_left_out(device: str, table: str) -> dict[str, dict[str, float]]:
    """Return errors of AMD's tables with each measured m of a pair left out in turn, and with whole pairs left out."""
    pairs, between, whole = products_amd.measured()[device, table], [], []
    for pair, times in pairs.items():
        if min(pair) < LEAST_SIDE:
            continue
        ms = np.array(sorted(times))
        ratio = np.log([times[m] for m in ms]) - np.log(products_amd.simple_s(device, table, ms, *pair))
        for place in range(1, len(ms) - 1):
            if ms[place] >= LEAST_M:
                others = np.delete(np.arange(len(ms)), place)
                made = np.interp(np.log(ms[place]), np.log(ms[others]), ratio[others])
                between.append(np.exp(made - ratio[place]))
        others = [other for other in pairs if other != pair]
        large_m = ms[(ms >= LEAST_M) & (ms <= products_amd.SHIPPED[-1])]
        if len(large_m):
            made = products_amd.distil(device, table, pairs, products_amd.SHIPPED, others)
            whole.append(made.seconds(large_m, *pair) / [times[m] for m in large_m])
    return {"m": figures(np.array(between)), "pairs": figures(np.concatenate(whole))}


def amd_off_grid(device: str, table: str) -> tuple[list[Floats], Errors, Errors]:
    """Return large products that are not points of a shipped AMD table, their measured and the table's seconds."""
    rows = [
        (m, *pair, seconds)
        for pair, times in products_amd.measured()[device, table].items()
        for m, seconds in times.items()
        if m >= LEAST_M and min(pair) >= LEAST_SIDE and m not in products_amd.SHIPPED
    ]
    m, n, k, measured = (np.array(column, float) for column in zip(*rows, strict=True))
    return [m, n, k], measured, table_s(device, table, m, n, k)


def tables() -> Iterator[tuple[str, str]]:
    """Yield (device, table) of all shipped tables of seconds of NVIDIA's devices."""
    for name in entries("products"):
        device, table = name.split("/", 1)
        if table in products.KERNELS:
            yield device, table


def report() -> dict[str, Any]:
    """Return all figures, by table."""
    made: dict[str, Any] = {}
    for device, table in tables():
        rows, _ = products.of_kernel(device, table)
        following = products.waves(device, table)
        made[f"{device}/{table}"] = {
            "shipped": shipped(device, table),
            "left out": by_side(rows, following),
            "between frameworks": spread([*rows, *products.of_other_frameworks(device, table)]),
            "by framework": {one.framework: by_side([one], following, step=2) for one in rows} if len(rows) > 1 else {},
        }
        print(device, table, json.dumps(made[f"{device}/{table}"]["left out"]), flush=True)
    for device, table in products_amd.measured():
        at, measured, predicted = amd_off_grid(device, table)
        made[f"{device}/{table}"] = {
            "shipped": {
                "m": figures(predicted / measured),
                "equations": figures(equations_s(workload(device, table), *at) / measured),
                "quantiles": quantiles(predicted / measured),
            },
            "left out": amd_left_out(device, table),
        }
        print(device, table, json.dumps(made[f"{device}/{table}"]), flush=True)
    return made


def sample(count: int = 12) -> str:
    """Return rows off the shipped grids as CSV: ``count`` of each device, table and band of m."""
    random, text = np.random.default_rng(SEED), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["device", "table", "m", "n", "k", "microseconds"])
    for device, table in tables():
        everything = np.sort(np.concatenate([ABSENT, ABSENT_UNALIGNED]))
        at, measured, _ = off_grid(device, table, everything, every=True)
        _write_bands(writer, random, (device, table), at, measured, count)
    for device, table in products_amd.measured():
        at, measured, _ = amd_off_grid(device, table)
        _write_bands(writer, random, (device, table), at, measured, count)
    return text.getvalue()


def _write_bands(
    writer: Any, random: np.random.Generator, name: tuple[str, str], at: list[Floats], measured: Errors, count: int
) -> None:
    """Write ``count`` rows of each band: small products, and large ones with aligned and unaligned m."""
    big = (at[0] >= LEAST_M) & (at[1] >= LEAST_SIDE) & (at[2] >= LEAST_SIDE)
    aligned = at[0] % 16 == 0
    for band, size in ((~big, count), (big & aligned, 2 * count), (big & ~aligned, count)):
        places = np.flatnonzero(band)
        for place in np.sort(random.choice(places, min(size, len(places)), replace=False)):
            writer.writerow([*name, *(int(column[place]) for column in at), f"{1e6 * measured[place]:.5g}"])


def main() -> None:
    """Write the figures and the sample."""
    SAMPLE.write_bytes(gzip.compress(sample().encode(), mtime=0))
    RESULTS.write_text(json.dumps(report(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

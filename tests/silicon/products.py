"""Distils measured matrix products into ``partool/catalog/silicon/products.json`` and ``products.npz``.

Run ``PYTHONPATH=tests python -m silicon.products`` where the folder of measurements is (:data:`writing.DATA`). A table
is named ``<device>/<dtype>/<kernel>``. Beside a table of NVIDIA's devices, ``<table>/unaligned`` has the logarithm of
the ratio by which products with m % 16 != 0 take longer, and ``<device>/fp8/scale`` the computation of a scale.

One rule cleans all tables. Whole kernels are left out if their rows contain the host's time, which shows in a least
time of more than :data:`MOST_START_S`. A measurement is isolated, and left out, if it differs by more than
:data:`silicon.products_fit.ISOLATED` from its neighbours along every axis, to the same side. Measurements of one
product by several frameworks count as repeats: the table has their median. Times are monotone in m by an isotonic fit
of their logarithms.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from silicon import products_amd, writing
from silicon.products_fit import Floats, completed, cube, isolated, monotone

from partool.catalog.lookup import table as catalog
from partool.catalog.silicon.grid import MeasuredGrid, Origin
from partool.catalog.silicon.products import ProductGrid, Waves

SIDES = np.array(
    [32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 16384,
     51200, 65536], float,
)  # fmt: skip
"""Values of n and of k that were measured."""
ALIGNED = np.array(
    [1, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560,
     2816, 3072, 3328, 3584, 3840, 4096, 4352, 8192, 16384, 32768], float,
)  # fmt: skip
"""Values of m that were measured and that are multiples of 16, and three below 16."""
SHIPPED = np.array(
    [1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096, 8192, 16384,
     32768], float,
)  # fmt: skip
"""Values of m in the tables."""
UNALIGNED = np.array([17, 33, 65, 97, 129, 193, 257, 513, 769, 1025, 1537, 2049, 3073, 4097], float)
"""Values of m in the tables of ratios."""
UNALIGNED_SIDES = np.array([256, 1024, 4096, 16384], float)
"""Values of n and k in the tables of ratios: each ratio is the median over the measured values that are nearest."""
MOST_START_S = 20e-6
"""Least time of a kernel, over all sizes, above which its rows contain the host's time: the other kernels start in 1.5
to 12.4 µs, those that are left out in 55 to 282 µs."""
FULL = 25_000
"""Least number of rows of a framework that measured the whole grid; partial grids only show the spread."""
DTYPES = ("bfloat16", "fp8", "fp8_block")
"""Types of products in training. Products in four bits are left out."""
KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bf16/linear": ("bfloat16", ("VLLM", "SGLang", "TRTLLM")),
    "fp8/scaled_mm": ("fp8", ("VLLM", "SGLang", "TRTLLM")),
    "fp8_block/deepgemm": ("fp8_block", ("SGLang",)),
    "fp8_block/trtllm": ("fp8_block", ("TRTLLM",)),
}
"""Table → the measurements' type, and the frameworks whose median it is. The torch linear layers of three frameworks
call cuBLAS. ``scaled_mm`` is the median of three implementations of scales per tensor or row. TensorRT-LLM's products
with scales per block stand in where DeepGEMM does not run."""
TILES = {"bf16/linear": (128, 256), "fp8/scaled_mm": (128, 128)}
"""Table → rows and columns of the tiles whose waves its seconds follow between measured sizes, on :data:`WAVED`. Of a
few tiles these leave the least errors where values of m are left out; values of n, left out, confirm the choice."""
WAVED = ("a100-80", "l40s", "rtx-pro-6000")
"""Devices whose kernels compute one tile of the result after the other on each multiprocessor. On Hopper's and
Blackwell's servers kernels are persistent and choose among more tiles: there waves lower no errors."""
TEXTS = {
    "bf16/linear": "cuBLAS linear layer",
    "fp8/scaled_mm": "fp8 linear layer with scales per tensor or row, with its input's quantisation",
    "fp8_block/deepgemm": "DeepGEMM with scales per block, with its input's quantisation",
    "fp8_block/trtllm": "TensorRT-LLM linear layer with scales per block, with its input's quantisation",
}


@dataclass
class Measured:
    """Rows of one kernel of one framework."""

    dtype: str
    framework: str
    version: str
    source: str
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats

    def cube(self, ms: Floats, sides: Floats = SIDES) -> Floats:
        """Return logarithms of seconds [m, n, k]; NaN where nothing was measured."""
        return cube((self.m, self.n, self.k), self.seconds, (ms, sides, sides))


@dataclass
class Distilled:
    """A table of logarithms of seconds, and what it was made of."""

    log_s: Floats
    frameworks: list[str]
    rows: int
    dropped: dict[str, int] = field(default_factory=dict)


@cache
def measured(device: str) -> list[Measured]:
    """Return all rows of a device of the catalog by type and framework; of each framework its newest version."""
    system = next(name for name, catalog_name in writing.SYSTEMS.items() if catalog_name == device)
    table = pq.read_table(writing.DATA / "gemm.parquet", filters=[("system", "=", system)])
    groups = table.group_by(["gemm_dtype", "framework", "version", "kernel_source"]).aggregate([]).to_pylist()
    newest, loaded = newest_versions(groups), []
    for group in groups:
        if group["gemm_dtype"] in DTYPES and group["version"] == newest[group["framework"]]:
            rows = table.filter(reduce(pc.and_, (pc.equal(table[name], value) for name, value in group.items())))
            m, n, k, seconds = (np.array(rows[name], float) for name in ("m", "n", "k", "latency"))
            names = (group[name] for name in ("gemm_dtype", "framework", "version", "kernel_source"))
            loaded.append(Measured(*names, m, n, k, 1e-3 * seconds))
    return sorted(loaded, key=lambda one: (one.dtype, one.framework, one.source))


def newest_versions(groups: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return each framework's newest version."""
    newest: dict[str, str] = {}
    for group in groups:
        newest[group["framework"]] = max(newest.get(group["framework"], ""), group["version"], key=_number)
    return newest


def _number(version: str) -> list[int]:
    parts = version.replace("rc", ".").replace("post", ".").split("+")[0].split(".")
    return [int(part) if part.isdigit() else 0 for part in parts]


def without_host(rows: Sequence[Measured]) -> tuple[list[Measured], int]:
    """Return the kernels whose rows do not contain the host's time, and the number of rows of the others."""
    kept = [one for one in rows if one.seconds.min() <= MOST_START_S]
    return kept, sum(len(one.seconds) for one in rows) - sum(len(one.seconds) for one in kept)


def waves(device: str, kernel: str) -> Waves | None:
    """Return the waves that a table's seconds follow between measured sizes; None if they follow none."""
    if device not in WAVED or kernel not in TILES:
        return None
    return Waves(catalog("accelerators")[device]["units"], *TILES[kernel])


def distil(rows: Sequence[Measured], ms: Floats, ns: Floats, ks: Floats, following: Waves | None = None) -> Distilled:
    """Return the table of one device's kernel at these sizes, made of the measurements at these sizes alone.

    Logarithms are less those of the waves that the seconds follow.
    """
    axes = (ms, ns, ks)
    cubes, dropped, counted = [], 0, 0
    for one in rows:
        log_s = cube((one.m, one.n, one.k), one.seconds, axes)
        alone = isolated(log_s, axes)
        dropped, counted = dropped + int(alone.sum()), counted + int(np.isfinite(log_s).sum())
        cubes.append(np.where(alone, np.nan, log_s))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # entries that nobody measured
        median = np.nanmedian(np.stack(cubes), axis=0)
    median = completed(median, axes)
    if following is not None:
        median = median - following.log(ms[:, None, None], ns[:, None])
    names = [f"{one.framework} {one.version} ({one.source})" for one in rows]
    return Distilled(monotone(median), names, counted - dropped, {"isolated": dropped} if dropped else {})


def of_kernel(device: str, kernel: str) -> tuple[list[Measured], int]:
    """Return the rows that a table is made of, and the number of rows of its type with the host's time in them."""
    dtype, frameworks = KERNELS[kernel]
    kept, hosted = without_host([one for one in measured(device) if one.dtype == dtype])
    return [one for one in kept if one.framework in frameworks and len(one.seconds) >= FULL], hosted


def of_other_frameworks(device: str, kernel: str) -> list[Measured]:
    """Return the complete rows of frameworks whose products of the same type are not in a table."""
    dtype, frameworks = KERNELS[kernel]
    kept, _ = without_host([one for one in measured(device) if one.dtype == dtype])
    return [one for one in kept if one.framework not in frameworks and len(one.seconds) >= FULL]


def sides_of(rows: Sequence[Measured]) -> Floats:
    """Return the values of n and k at which a kernel was measured."""
    return SIDES[np.isin(SIDES, rows[0].n) & np.isin(SIDES, rows[0].k)]


def grids() -> Iterator[tuple[str, MeasuredGrid]]:
    """Yield (name, table) of all NVIDIA devices."""
    for device in writing.SYSTEMS.values():
        for kernel in KERNELS:
            rows, hosted = of_kernel(device, kernel)
            if not rows or (kernel == "fp8_block/trtllm" and of_kernel(device, "fp8_block/deepgemm")[0]):
                continue
            sides = sides_of(rows)
            following = waves(device, kernel)
            made = distil(rows, SHIPPED, sides, sides, following)
            dropped = made.dropped | ({"host time": hosted} if hosted else {})
            origin = writing.origin(device, TEXTS[kernel], ", ".join(made.frameworks), made.rows, dropped)
            entry: Any = {**origin, **({"waves": list(following)} if following else {})}
            table = ProductGrid(MeasuredGrid({"m": SHIPPED, "n": sides, "k": sides}, made.log_s, entry), following)
            yield f"{device}/{kernel}", table.grid
            yield f"{device}/{kernel}/unaligned", unaligned(rows, table, origin)


def unaligned(rows: Sequence[Measured], table: ProductGrid, origin: Origin) -> MeasuredGrid:
    """Return logarithms of the ratios of unaligned products to the table, by m and coarsely by n and k."""
    sides = table.grid.axes["n"]
    made = np.full((len(UNALIGNED), len(UNALIGNED_SIDES), len(UNALIGNED_SIDES)), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        log_s = np.nanmedian(np.stack([one.cube(UNALIGNED, sides) for one in rows]), axis=0)
        ratio = log_s - table.log_s(*np.meshgrid(UNALIGNED, sides, sides, indexing="ij"))
        nearest = np.abs(np.log(sides)[:, None] - np.log(UNALIGNED_SIDES)).argmin(axis=1)
        for n in range(len(UNALIGNED_SIDES)):
            for k in range(len(UNALIGNED_SIDES)):
                made[:, n, k] = np.nanmedian(ratio[:, nearest == n][:, :, nearest == k], axis=(1, 2))
    axes = {"m": UNALIGNED, "n": UNALIGNED_SIDES, "k": UNALIGNED_SIDES}
    return MeasuredGrid(axes, made, origin | {"rows": int(np.isfinite(log_s).sum()), "dropped": {}})


def scales() -> Iterator[tuple[str, MeasuredGrid]]:
    """Yield (name, table) of the seconds in which torch operators compute the scale of a tensor [m, k].

    Differences of two kernels (vLLM) and kernels that need no scale (SGLang: 0 s) are left out.
    """
    rows = pq.read_table(writing.DATA / "quantise.parquet").filter(pc.field("kernel_source") == "torch_ops").to_pylist()
    for system, device in writing.SYSTEMS.items():
        mine = [row for row in rows if row["system"] == system]
        ms = np.array([1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768], float)
        if not mine:
            continue
        m, k, seconds = (np.array([row[name] for row in mine], float) for name in ("m", "k", "latency"))
        kept = seconds > 0.0
        log_s = cube((m[kept], k[kept]), 1e-3 * seconds[kept], (ms, SIDES))
        origin = writing.origin(
            device, "scale of a tensor by torch operators", f"TRTLLM {mine[0]['version']} (torch_ops)",
            int(np.isfinite(log_s).sum()), {"zero": int((~kept).sum())} if not kept.all() else {},
        )  # fmt: skip
        filled = completed(log_s, (ms, SIDES))
        yield f"{device}/fp8/scale", MeasuredGrid({"m": ms, "k": SIDES}, monotone(filled), origin)


def main() -> None:
    """Write the tables and print their size."""
    made = dict(grids()) | dict(scales()) | dict(products_amd.grids())
    for name, grid in made.items():
        assert np.isfinite(grid.log_s).all(), name
    print(f"{len(made)} tables, {writing.write('products', made)} bytes")


if __name__ == "__main__":
    sys.exit(main())

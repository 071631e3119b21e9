"""Distils AMD's tuned products, which were measured for the shapes of some models only.

A table's n and k are all those of the measured pairs, so that measured pairs are points of the grid. Other pairs have
the ratio to a simple equation that the nearest measured pairs have, weighted by distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from silicon import writing
from silicon.products_fit import Floats, isolated, monotone

from partool.catalog.lookup import table
from partool.catalog.silicon.grid import MeasuredGrid, Origin

SHIPPED = np.array(
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768],
    float,
)
"""Values of m in the tables."""
DEVICES = {("gfx942", "304"): "mi300x", ("gfx950", "256"): "mi355x"}
"""Architecture and number of compute units → catalog name."""
KERNELS = {"torch.bfloat16": "bf16/aiter", "a8w8": "fp8/aiter", "a8w8_blockscale": "fp8_block/aiter"}
"""Type of the measurements → table."""
TEXTS = {
    "bf16/aiter": "tuned product of aiter, hipBLASLt or Triton",
    "fp8/aiter": "tuned product of aiter with scales per row",
    "fp8_block/aiter": "tuned product of aiter with scales per block",
}
FEWEST_PAIRS = 10
"""Least number of pairs (n, k) of a table."""
_START_S = 3e-6

Pair = tuple[float, float]


@cache
def measured() -> dict[tuple[str, str], dict[Pair, dict[float, float]]]:
    """Return (device, table) → (n, k) → m → seconds: the median of repeats."""
    repeats: dict[tuple[str, str], dict[Pair, dict[float, list[float]]]] = {}
    for row in pq.read_table(writing.DATA / "amd_gemm.parquet").to_pylist():
        device, kernel = DEVICES.get((row["gfx"], row["cu_num"])), KERNELS.get(row["dtype"])
        # Rows with float32 results and batched rows are other products.
        if device and kernel and row["B"] is None and row["outdtype"] != "torch.float32":
            pairs = repeats.setdefault((device, kernel), {})
            times = pairs.setdefault((float(row["N"]), float(row["K"])), {})
            times.setdefault(float(row["M"]), []).append(1e-6 * row["us"])
    return {
        key: {pair: {m: float(np.median(each)) for m, each in times.items()} for pair, times in pairs.items()}
        for key, pairs in repeats.items()
        if len(pairs) >= FEWEST_PAIRS
    }


def simple_s(device: str, kernel: str, m: Any, n: Any, k: Any) -> Any:
    """Return seconds by FLOPs, bytes and a start alone."""
    entry = table("accelerators")[device]
    fp8 = kernel.startswith("fp8")
    flops_per_s = 1e12 * entry["achievable_tflops"]["fp8" if fp8 else "bf16"]
    moved = (1.0 if fp8 else 2.0) * (m * k + n * k) + 2.0 * m * n
    return 2.0 * m * n * k / flops_per_s + moved / (0.85e9 * entry["memory_gb_per_s"]) + _START_S


def curve(device: str, kernel: str, pair: Pair, times: dict[float, float], ms: Floats) -> tuple[Floats, int]:
    """Return a pair's logarithms of the ratio to the simple equation at ``ms``, and the number of isolated rows.

    At each m it is the median of the rows that are nearer to it than to its neighbours; without such rows it is between
    those of the neighbours.
    """
    at = np.array(sorted(times))
    log_s = np.log([times[m] for m in at])
    alone = isolated(log_s, [at]) if len(at) > 2 else np.zeros(len(at), bool)
    at, log_s = at[~alone], log_s[~alone]
    ratio = log_s - np.log(simple_s(device, kernel, at, *pair))
    nearest = np.abs(np.log(at)[:, None] - np.log(ms)).argmin(axis=1)
    exact = dict(zip(at, ratio, strict=True))
    filled = sorted(set(nearest))
    values = [exact.get(ms[place], np.median(ratio[nearest == place])) for place in filled]
    return np.interp(np.log(ms), np.log(ms[filled]), values), int(alone.sum())


def distil(
    device: str, kernel: str, pairs: dict[Pair, dict[float, float]], ms: Floats, only: Sequence[Pair] | None = None
) -> MeasuredGrid:
    """Return a table of the measurements of ``pairs``, or of ``only`` some of them."""
    used = list(only if only is not None else pairs)
    curves = [curve(device, kernel, pair, pairs[pair], ms) for pair in used]
    ratios = np.stack([ratio for ratio, _ in curves])
    ns, ks = (np.array(sorted({pair[side] for pair in pairs})) for side in (0, 1))
    n, k = np.meshgrid(ns, ks, indexing="ij")
    at = np.log(np.array(used))
    distance = (np.log(n)[..., None] - at[:, 0]) ** 2 + (np.log(k)[..., None] - at[:, 1]) ** 2
    weight = 1.0 / (distance + 1e-9) ** 2
    ratio = np.einsum("nkp,pm->mnk", weight / weight.sum(axis=-1, keepdims=True), ratios)
    log_s = ratio + np.log(simple_s(device, kernel, ms[:, None, None], n, k))
    rows, dropped = sum(len(pairs[pair]) for pair in used), sum(alone for _, alone in curves)
    origin = Origin(
        device=device, kernel=TEXTS[kernel], framework="ROCm/aiter e4048607",
        source="github.com/ROCm/aiter e4048607, AMD", licence="MIT", date="2026-11",
        rows=rows - dropped, dropped={"isolated": dropped} if dropped else {},
    )  # fmt: skip
    return MeasuredGrid({"m": ms, "n": ns, "k": ks}, monotone(log_s), origin)


def grids() -> Iterator[tuple[str, MeasuredGrid]]:
    """Yield (name, table) of all AMD devices."""
    for (device, kernel), pairs in measured().items():
        yield f"{device}/{kernel}", distil(device, kernel, pairs, SHIPPED)

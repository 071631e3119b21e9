"""Distils measured collectives within a node into ``partool/catalog/silicon/collectives.*``.

Run ``python tests/silicon/collectives.py`` from the repository's root; it reads ``../shared/data/silicon``.

Sizes in elements become bytes, so that rows of both types describe one curve. Repeats (versions, types) are joined by
their median. Rows below ``SMALLEST`` bytes are dropped: they take the time of the smallest size. Rows further than
``FAR`` from the median of their point are dropped as outliers. Times grow with bytes by an isotonic fit of logarithms.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet as pq
from writing import DATA, SYSTEMS, origin, write

from partool.catalog.silicon.collectives import Operation
from partool.catalog.silicon.grid import MeasuredGrid

SMALLEST = 1024
FAR = 2.5
"""Largest ratio of a measurement to the median of its point, or of the median to it."""
OPERATION: dict[str, Operation] = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce", "alltoall": "all_to_all",
}  # fmt: skip
_BYTES = {"half": 2, "int8": 1}

Point = tuple[str, Operation, int, int]
"""Catalog name of the device, operation, number of ranks, bytes of the whole tensor."""


def rows() -> dict[Point, list[float]]:
    """Return the measured seconds of each point."""
    points: dict[Point, list[float]] = defaultdict(list)
    for row in pq.read_table(DATA / "nccl.parquet").to_pylist():
        size = row["message_size"] * _BYTES[row["nccl_dtype"]]
        at = SYSTEMS[row["system"]], OPERATION[row["op_name"]], row["num_gpus"], size
        points[at].append(row["latency"] * 1e-3)
    return points


def distilled(points: Mapping[Point, list[float]]) -> dict[str, MeasuredGrid]:
    """Return the tables of ``points``, by name; sizes that are missing at one number of ranks are interpolated."""
    of_table: dict[tuple[str, Operation], dict[tuple[int, int], list[float]]] = defaultdict(dict)
    for (device, operation, ranks, size), seconds in points.items():
        of_table[device, operation][ranks, size] = seconds
    return {f"{device}/{operation}/nccl": _table(device, operation, of) for (device, operation), of in of_table.items()}


def _table(device: str, operation: Operation, points: dict[tuple[int, int], list[float]]) -> MeasuredGrid:
    small = sum(len(seconds) for (_, size), seconds in points.items() if size < SMALLEST)
    points = {at: seconds for at, seconds in points.items() if at[1] >= SMALLEST}
    kept = {at: near(seconds) for at, seconds in points.items()}
    ranks, sizes = (sorted({at[axis] for at in kept}) for axis in (0, 1))
    log_s = []
    for rank in ranks:
        own = [size for size in sizes if (rank, size) in kept]
        medians = [float(np.log(np.median(kept[rank, size]))) for size in own]
        fitted = isotonic(np.array(medians), np.array([len(kept[rank, size]) for size in own], float))
        log_s.append(np.interp(np.log(sizes), np.log(own), fitted))
    count = sum(len(seconds) for seconds in kept.values())
    outliers = sum(len(seconds) for seconds in points.values()) - count
    dropped = {f"smaller than {SMALLEST} bytes": small, f"{FAR} times off the median of repeats": outliers}
    return MeasuredGrid(
        {"ranks": np.array(ranks, float), "bytes": np.array(sizes, float)},
        np.array(log_s),
        origin(device, operation, "NCCL 2.27.3 to 2.29.2", count, dropped),
    )


def near(seconds: Iterable[float]) -> list[float]:
    """Return repeats of one measurement without those that are far from their median."""
    values = list(seconds)
    middle = float(np.median(values))
    return [value for value in values if middle / FAR <= value <= middle * FAR]


def isotonic(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest values that never fall (pool adjacent violators; Barlow and others, Wiley 1972)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((float(value), float(weight), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, left_weight, left_count), (right, right_weight, right_count) = blocks[-2:]
            weight_sum = left_weight + right_weight
            mean = (left * left_weight + right * right_weight) / weight_sum
            blocks[-2:] = [(mean, weight_sum, left_count + right_count)]
    return np.concatenate([np.full(count, value) for value, _, count in blocks])


if __name__ == "__main__":
    print(write("collectives", distilled(rows())), "bytes")

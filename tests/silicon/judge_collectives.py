"""Compares prices of collectives with the measurements and with published nccl-tests lines.

``python tests/silicon/judge_collectives.py`` writes ``tests/bench/results/silicon_collectives.json``. With ``sample``
it draws ``tests/data/silicon/collectives.csv.gz`` and ``deepep.csv`` anew. Both need ``../shared/data/silicon``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from partool.catalog.hardware import resolve_hardware
from partool.catalog.silicon.collectives import Operation
from partool.cost import collective
from partool.cost.silicon import collectives as prices
from partool.spec.hardware import Devices, HardwareSpec
from partool.work.base import Workload

sys.path.insert(0, str(Path(__file__).parent))
import pyarrow.parquet as pq
from collectives import SMALLEST, Point, distilled, rows
from writing import DATA, SYSTEMS

REPOSITORY = Path(__file__).parents[2]
SAMPLE = REPOSITORY / "tests" / "data" / "silicon" / "collectives.csv.gz"
EXCHANGES = REPOSITORY / "tests" / "data" / "silicon" / "deepep.csv"
PUBLISHED = REPOSITORY / "tests" / "data" / "silicon" / "nccl_tests.csv"
RESULTS = REPOSITORY / "tests" / "bench" / "results" / "silicon_collectives.json"
SEED = 50
JUDGED = 4096
"""Least bytes of collectives whose errors are counted."""
OF_OPERATION = {
    "all_gather": collective.gather_s, "reduce_scatter": collective.reduce_scatter_s,
    "all_reduce": collective.all_reduce_s, "all_to_all": collective.all_to_all_s,
}  # fmt: skip
Ratios = dict[tuple[str, Operation, int], list[float]]
"""Predicted over measured seconds, by device, operation and number of ranks."""


@dataclass(frozen=True)
class Errors:
    """Relative errors: their number, median and 90th percentile, and the median ratio of predicted to measured."""

    count: int
    median: float
    p90: float
    ratio: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Errors:
        """Return the errors of ratios of predicted to measured."""
        values = np.array(list(ratios))
        errors = np.abs(values - 1.0)
        return cls(
            len(values), *(round(float(one), 3) for one in (
                np.median(errors), np.quantile(errors, 0.9), np.median(values)
            ))
        )  # fmt: skip


@cache
def machine(accelerator: str, **given: Any) -> Devices:
    """Return machines of the catalog, with figures as in a spec's ``hardware`` section."""
    devices = resolve_hardware(HardwareSpec(accelerator=accelerator, **given), "bf16").devices
    assert devices is not None
    return devices


def shipped(points: Mapping[Point, list[float]]) -> Ratios:
    """Return how the shipped tables price each measurement of at least ``JUDGED`` bytes."""
    ratios: Ratios = defaultdict(list)
    for (device, operation, ranks, size), measured in points.items():
        if size >= JUDGED:
            price = prices.seconds(machine(device), operation, float(size), ranks)
            assert price is not None
            ratios[device, operation, ranks] += [float(price) / one for one in measured]
    return ratios


def left_out(points: Mapping[Point, list[float]]) -> Ratios:
    """Return how tables made of every other size price the medians of the sizes between.

    Both halves are left out in turn; the smallest and the largest size stay.
    """
    ratios: Ratios = defaultdict(list)
    sizes = sorted({size for *_, size in points if size >= SMALLEST})
    for odd in (0, 1):
        gone = set(sizes[1 + odd : -1 : 2])
        tables = distilled({at: seconds for at, seconds in points.items() if at[-1] not in gone})
        for (device, operation, ranks, size), measured in points.items():
            if size in gone and size >= JUDGED:
                price = float(tables[f"{device}/{operation}/nccl"].seconds(float(ranks), float(size)))
                ratios[device, operation, ranks].append(price / float(np.median(measured)))
    return ratios


def equations(points: Mapping[Point, list[float]]) -> Ratios:
    """Return how the equations for devices without a table price the medians of at least ``JUDGED`` bytes."""
    ratios: Ratios = defaultdict(list)
    for (device, operation, ranks, size), measured in points.items():
        if size >= JUDGED:
            job = _Job(machine(device).model_copy(update={"accelerator": "unmeasured", "measured_as": ""}))
            neighbours = collective.RankGroup(ranks, ranks, ranks)
            price = collective.inside_s(job, operation, float(size), neighbours)  # type: ignore[arg-type]
            ratios[device, operation, ranks].append(float(price) / float(np.median(measured)))
    return ratios


@dataclass(frozen=True)
class _Job:
    """The part of a workload that prices of collectives read."""

    devices: Devices

    @property
    def domain(self) -> int:
        return self.devices.domain or self.devices.per_node


def published() -> list[dict[str, Any]]:
    """Return the published lines with the predicted seconds, as ``predicted_us``."""
    lines = []
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            nodes, ranks, size = int(row["nodes"]), int(row["ranks_per_node"]), float(row["bytes"])
            given: dict[str, Any] = {"nodes": nodes, "per_node": ranks}
            if ranks > 8:  # a rack of trays of four devices
                given = {"nodes": nodes * ranks // 4, "per_node": 4, "domain": ranks}
            if row["note"].endswith("fabric_gb_per_s 12.5"):
                given["fabric_gb_per_s"] = 12.5
            job: Workload = _Job(machine(row["device"], fabric=row["fabric"], **given))  # type: ignore[assignment]
            everyone = collective.group(job, nodes * ranks, 1)
            seconds = float(OF_OPERATION[row["operation"]](job, size, everyone))
            lines.append({**row, "predicted_us": round(1e6 * seconds, 1)})
    return lines


UNITS = 24
"""Units of a device that the measured kernels of exchanges take; DeepEP's own default is 20."""


def measured_exchanges() -> list[dict[str, Any]]:
    """Return measured exchanges of 1,024 to 65,536 tokens by kernels that send a token once.

    A dispatch was measured in eight bits. Training sends 16 bits both ways, so both ways count as a combine. Rows of
    H200 on several nodes are copies of H100's.
    """
    return [
        {
            "device": SYSTEMS[row["system"]], "nodes": row["node_num"], "tokens": row["num_token"],
            "hidden": row["hidden_size"], "top_k": row["num_topk"],
            "us": round(2.0 * (row["combine_transmit_us"] + row["combine_notify_us"]), 1),
        }
        for row in pq.read_table(DATA / "deepep.parquet").to_pylist()
        if row["dispatch_sms"] == UNITS and 1024 <= row["num_token"] <= 65536
        and (row["node_num"] == 1 or row["system"] != "h200_sxm")
    ]  # fmt: skip


def exchanges(measured: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], list[float]]:
    """Return predicted over measured seconds of exchanges, by device and number of nodes."""
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in measured:
        device, nodes = row["device"], int(row["nodes"])
        per_node = 4 if device.startswith("gb") else 8
        job: Workload = _Job(machine(device, nodes=nodes, per_node=per_node, fabric="ib-ndr"))  # type: ignore[assignment]
        token_bytes = 2.0 * int(row["tokens"]) * int(row["hidden"])
        everyone = collective.group(job, nodes * per_node, 1)
        price = float(collective.token_exchange_s(job, token_bytes, everyone, float(row["top_k"])))
        ratios[device, nodes].append(1e6 * price / float(row["us"]))
    return ratios


def sampled_exchanges() -> list[dict[str, str]]:
    """Return the committed sample of exchanges."""
    with EXCHANGES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sampled() -> dict[Point, list[float]]:
    """Return the committed sample: one of the repeats of each point."""
    points: dict[Point, list[float]] = {}
    with gzip.open(SAMPLE, "rt", encoding="utf-8", newline="") as file:
        for device, operation, ranks, size, us in list(csv.reader(file))[1:]:
            points[device, operation, int(ranks), int(size)] = [float(us) * 1e-6]  # type: ignore[index]
    return points


def draw() -> None:
    """Write one repeat of each point, drawn with ``SEED``; the same measurements give the same bytes."""
    pick, text = random.Random(SEED), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["device", "operation", "ranks", "bytes", "us"])
    for at, seconds in sorted(rows().items()):
        if at[-1] >= SMALLEST:
            writer.writerow([*at, f"{1e6 * pick.choice(seconds):.4g}"])
    SAMPLE.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    by_size = defaultdict(list)
    for row in measured_exchanges():
        by_size[row["device"], row["nodes"], row["tokens"]].append(row)
    with EXCHANGES.open("w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, next(iter(by_size.values()))[0], lineterminator="\n")
        lines.writeheader()
        lines.writerows(row for _, of in sorted(by_size.items()) for row in pick.sample(of, min(4, len(of))))


def results() -> dict[str, Any]:
    """Return errors by table and of the published lines."""
    points = rows()
    judged = {"shipped": shipped(points), "sizes left out": left_out(points), "equations": equations(points)}
    tables = {
        "/".join(map(str, at)): {name: vars(Errors.of(ratios[at])) for name, ratios in judged.items()}
        for at in sorted(judged["shipped"])
    }
    by_device: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, ratios in judged.items():
        for device in {at[0] for at in ratios}:
            by_device[device][name] = vars(Errors.of(one for at, of in ratios.items() if at[0] == device for one in of))
    lines = published()
    across = defaultdict(list)
    for line in lines:
        name = f"{line['device']} {line['nodes']}x{line['ranks_per_node']} {line['fabric']} {line['operation']}"
        across[name].append(line["predicted_us"] / float(line["us"]))
    once = {
        f"{device} x {nodes}": vars(Errors.of(of)) for (device, nodes), of in exchanges(measured_exchanges()).items()
    }
    return {
        "exchanges of tokens": dict(sorted(once.items())),
        "devices": dict(sorted(by_device.items())),
        "tables": tables,
        "published": {name: vars(Errors.of(ratios)) for name, ratios in sorted(across.items())},
    }


if __name__ == "__main__":
    if "sample" in sys.argv[1:]:
        draw()
    RESULTS.write_text(json.dumps(results(), indent=1) + "\n", encoding="utf-8")

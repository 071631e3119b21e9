"""Fits the constants of collectives across nodes with publishers left out, and judges them on those left out.

``python tests/silicon/fit_collectives.py`` prints, for published lines of nccl-tests on nodes of up to eight NVIDIA
devices, the constants that the other publishers' lines give, the errors of these constants on the publisher's lines,
and those of the shipped constants; then the same for DeepEP's exchanges with numbers of nodes left out.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partool.cost import collective

sys.path.insert(0, str(Path(__file__).parent))
import judge_collectives as judge

CONSTANTS: dict[str, tuple[float, ...]] = {
    "_FABRIC_SHARE": (0.75, 0.80, 0.85, 0.90, 0.95),
    "_MORE_START_S": (12e-6, 20e-6, 28e-6, 37.5e-6, 45e-6, 55e-6),
    "_QUICK_BYTES_PER_S": (8e9, 12e9, 16e9, 24e9, 32e9),
    "_HOP": (0.2, 0.3, 0.4, 0.5, 0.6),
    "_FIRST_PIECES_S": (0.0, 30e-6, 60e-6, 120e-6, 240e-6, 1.0),
}
"""Constant of :mod:`partool.cost.collective` → its candidates, the first one for NVIDIA's devices of a dictionary."""
ONCE = {
    "_ONCE_START_S": (45e-6, 60e-6, 75e-6, 90e-6, 110e-6),
    "_ONCE_NODE_START_S": (30e-6, 50e-6, 65e-6, 80e-6, 100e-6),
}
ROUNDS = 3


@dataclass(frozen=True)
class Line:
    """A measured collective, and a function that prices it with the constants of the moment."""

    group: str
    measured_s: float
    price: Callable[[], float]


def published() -> list[Line]:
    """Return the lines of NVIDIA's devices with up to eight per node, of ``judge.JUDGED`` bytes or more."""
    lines = []
    with judge.PUBLISHED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            nodes, ranks, size = int(row["nodes"]), int(row["ranks_per_node"]), float(row["bytes"])
            given: dict[str, Any] = {"nodes": nodes, "per_node": ranks, "fabric": row["fabric"]}
            if row["note"].endswith("fabric_gb_per_s 12.5"):
                given["fabric_gb_per_s"] = 12.5
            devices = judge.machine(row["device"], **given)
            if ranks > 8 or size < judge.JUDGED or devices.backend != "cuda":
                continue
            job: Any = judge._Job(devices)
            of, everyone = judge.OF_OPERATION[row["operation"]], collective.group(job, nodes * ranks, 1)
            lines.append(
                Line(
                    publisher(row["source"]),
                    1e-6 * float(row["us"]),
                    lambda of=of, job=job, size=size, everyone=everyone: float(of(job, size, everyone)),
                )
            )
    return lines


def publisher(source: str) -> str:
    """Return who published a line."""
    names = {
        "issues/309": "nccl-tests issue 309", "nebius": "dstack, Nebius", "lambda": "dstack, Lambda",
        "gcp": "dstack, GCP",
        "Vultr": "Vultr", "aws": "AWS (EFA)", "lessizzmore": "A3 Mega", "oci": "OCI", "OCI": "OCI",
        "issues/119": "nccl-tests issue 119",
    }  # fmt: skip
    return next(name for part, name in names.items() if part in source)


def exchanges() -> list[Line]:
    """Return DeepEP's measured exchanges on H100, by number of nodes."""
    lines = []
    for row in judge.measured_exchanges():
        if row["device"] != "h100-sxm":
            continue
        nodes = int(row["nodes"])
        job: Any = judge._Job(judge.machine("h100-sxm", nodes=nodes, per_node=8, fabric="ib-ndr"))
        token_bytes, everyone = 2.0 * row["tokens"] * row["hidden"], collective.group(job, nodes * 8, 1)
        visits = float(row["top_k"])
        lines.append(
            Line(
                f"{nodes} nodes",
                1e-6 * row["us"],
                lambda job=job, token_bytes=token_bytes, everyone=everyone, visits=visits: float(
                    collective.token_exchange_s(job, token_bytes, everyone, visits)
                ),
            )
        )
    return lines


def put(name: str, value: float) -> float:
    """Set a constant for NVIDIA's devices, and return what it was."""
    constant = getattr(collective, name)
    if isinstance(constant, dict):
        before, constant["cuda"] = constant["cuda"], value
        return float(before)
    setattr(collective, name, value)
    return float(constant)


def loss(lines: Sequence[Line]) -> float:
    """Return the mean over groups of the median relative error: each publisher counts the same."""
    return float(np.mean([np.median(errors) for errors in by_group(lines).values()]))


def by_group(lines: Sequence[Line]) -> dict[str, list[float]]:
    """Return the relative errors of each group."""
    errors: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        errors[line.group].append(abs(line.price() / line.measured_s - 1.0))
    return errors


def fitted(lines: Sequence[Line], constants: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Set and return the constants that give the least loss, one after the other, in several rounds."""
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, values in constants.items():
            losses = {}
            for value in values:
                put(name, value)
                losses[value] = loss(lines)
            best[name] = min(values, key=lambda value: losses[value])
            put(name, best[name])
    return best


def report(lines: Sequence[Line], constants: Mapping[str, Sequence[float]]) -> None:
    """Print the errors of each group with the shipped constants, and with those of the other groups."""
    before = {name: put(name, values[0]) for name, values in constants.items()}

    def shipped() -> None:
        for name, value in before.items():
            put(name, value)

    shipped()
    for group, errors in by_group(lines).items():
        others = [line for line in lines if line.group != group]
        best = fitted(others, constants)
        out = by_group([line for line in lines if line.group == group])[group]
        shipped()
        text = ", ".join(f"{name.strip('_').lower()} {value:g}" for name, value in best.items())
        median, p90 = (f"{np.quantile(errors, q):.1%} shipped, {np.quantile(out, q):.1%} left out" for q in (0.5, 0.9))
        print(f"{group}: {len(errors)} lines, median {median}; p90 {p90}; {text}", flush=True)
    print("all:", fitted(lines, constants), f"{loss(lines):.1%}")
    shipped()
    print(f"shipped: {loss(lines):.1%}")
    for name, values in constants.items():
        losses = {}
        for value in values:
            put(name, value)
            losses[value] = round(100.0 * loss(lines), 1)
        shipped()
        print(f"{name} alone: {losses}")


if __name__ == "__main__":
    report(published(), CONSTANTS)
    if judge.DATA.is_dir():
        report(exchanges(), ONCE)

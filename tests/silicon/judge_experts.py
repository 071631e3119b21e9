"""Judges curves of layers of experts on measured rows: ``python tests/silicon/judge_experts.py`` writes the figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
from experts import made
from experts_data import Rows, amd, base_s, keys, nvidia
from numpy.typing import NDArray

from partool.catalog.devices import accelerator
from partool.catalog.lookup import table
from partool.catalog.silicon.experts import Curves, curves, equation_s
from partool.cost.time.gemm import equations_s
from partool.spec.hardware import HardwareSpec
from partool.spec.training import Precision
from partool.work.base import Workload

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "silicon_experts.json"
JUDGED_TOKENS = 1024
TOKEN_FOLDS = ((1536, 3072, 6144, 12288), (2048, 4096, 8192))
"""Numbers of tokens that are left out together; the least and largest stay, as curves do not go beyond them."""
_SHAPE_FOLDS = 5

Tables = dict[str, Curves]


def predicted_s(rows: Rows, tables: Tables) -> NDArray[np.float64]:
    """Return the seconds of measured rows by tables, with the work of inference engines for experts elsewhere."""
    out = np.empty(len(rows.columns["each"]))
    skewed = rows.columns["alpha"] > 0
    for load, mask in (("even", ~skewed), ("skewed", skewed)):
        if np.any(mask):
            part, fitted = rows.where(mask), tables[f"{rows.name}/{load}"]
            elsewhere = base_s(part) / equation_s(part.sizes, part.rates, part.element_bytes)
            out[mask] = fitted.seconds(part.sizes) * elsewhere
    return out


def ratio(rows: Rows, tables: Tables) -> NDArray[np.float64]:
    """Return predicted over measured seconds."""
    return predicted_s(rows, tables) / rows.columns["seconds"]


def large(rows: Rows) -> Rows:
    """Return the rows with as many tokens as those that are judged."""
    return rows.where(rows.columns["tokens"] >= JUDGED_TOKENS)


def shipped(rows: Rows) -> Tables:
    """Return the catalog's tables for these rows."""
    names = (f"{rows.name}/{load}" for load in ("even", "skewed"))
    return {name: fitted for name in names if (fitted := curves(name)) is not None}


def token_masks(rows: Rows) -> Iterator[NDArray[np.bool_]]:
    """Yield a mask for each group of token counts that are left out."""
    for fold in TOKEN_FOLDS:
        yield np.isin(rows.columns["tokens"], fold)


def shape_masks(rows: Rows) -> Iterator[NDArray[np.bool_]]:
    """Yield a mask for each group of model shapes that are left out; shapes share their widths and experts."""
    c = rows.columns
    shapes = np.stack([c["hidden"], c["all_inner"], c["all_experts"]], axis=1)
    different, place = np.unique(shapes, axis=0, return_inverse=True)
    for fold in range(min(_SHAPE_FOLDS, len(different))):
        mask = place.ravel() % _SHAPE_FOLDS == fold
        loads = {bool(load) for load in np.unique(c["alpha"] > 0)}
        if len(different) > 1 and {bool(load) for load in np.unique(c["alpha"][~mask] > 0)} == loads:
            yield mask


def before_s(rows: Rows) -> NDArray[np.float64]:
    """Return the seconds by equations alone: products at 0.85 of the dense rate, element-wise operators by bytes."""
    entry = table("accelerators")[rows.device]
    precision: Precision = "bf16" if rows.dtype == "bf16" else "fp8"
    devices = accelerator(HardwareSpec(accelerator=rows.device), rows.device, entry, entry["fabric"], precision)
    job, c = cast(Workload, SimpleNamespace(devices=devices)), rows.columns
    gates = 1 + rows.gated
    first = equations_s(job, c["each"], gates * c["inner"], c["hidden"], batch=c["experts"])
    second = equations_s(job, c["each"], c["hidden"], c["inner"], batch=c["experts"])
    moved = rows.sizes.rows * (7.0 * c["hidden"] + (1 + gates) * c["inner"]) * 2.0
    return np.asarray((first + second) / 0.85 + moved / (0.8 * devices.memory_bytes_per_s))


def figures(values: NDArray[np.float64]) -> dict[str, float | int]:
    """Return quantiles of predicted over measured, and the median and 90th percentile of the error."""
    error = np.abs(values - 1.0)
    return {
        "n": len(values), "low": _digits(np.quantile(values, 0.1)), "middle": _digits(np.quantile(values, 0.5)),
        "high": _digits(np.quantile(values, 0.9)), "median": _digits(np.median(error)),
        "p90": _digits(np.quantile(error, 0.9)),
    }  # fmt: skip


def _digits(value: float) -> float:
    return round(float(value), 4)


def frameworks_apart(rows: Rows, other: Rows) -> NDArray[np.float64]:
    """Return the seconds of another framework's call of the same kernel relative to these rows, where both are."""

    def keyed(part: Rows) -> dict[tuple[float, ...], float]:
        return dict(zip(keys(part), part.columns["seconds"].tolist(), strict=True))

    one, two = keyed(large(rows)), keyed(large(other))
    return np.array([two[key] / one[key] for key in one.keys() & two.keys()])


def judged(rows: Rows) -> dict[str, object]:
    """Return all figures of one table."""
    many = large(rows)
    now = ratio(many, shipped(rows))
    alone = many.columns["ranks"] == 1
    out: dict[str, object] = {"dropped": rows.dropped, "shipped": figures(now)}
    for name, mask in (
        ("even", many.columns["alpha"] == 0),
        ("skewed", many.columns["alpha"] > 0),
        ("one rank", alone),
    ):
        if np.any(mask):
            out[f"shipped, {name}"] = figures(now[mask])
    if np.any(alone):
        out["equations, one rank"] = figures(before_s(many.where(alone)) / many.columns["seconds"][alone])
    for name, masks in (("tokens left out", token_masks), ("shapes left out", shape_masks)):
        values = [ratio(large(rows.where(mask)), made([rows.where(~mask)])) for mask in masks(rows)]
        if values:
            out[name] = figures(np.concatenate(values))
    return out


def main(report: Callable[[str], None] = print) -> None:
    results = {}
    others = {rows.name: rows for rows in nvidia(other_calls=True)}
    for rows in nvidia() + amd():
        results[rows.name] = judged(rows)
        if rows.name in others and len(apart := frameworks_apart(rows, others[rows.name])):
            results[rows.name]["another framework's call"] = figures(apart)
        report(f"{rows.name} {results[rows.name]}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

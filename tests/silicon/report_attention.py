"""Writes the errors of attention's tables and of the equation to ``tests/bench/results/silicon_attention.json``.

Run ``PYTHONPATH=tests python -m silicon.report_attention`` where the folder of measurements is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from silicon.attention import read
from silicon.attention_fit import Floats, Rows
from silicon.judge_attention import LEFT_OUT, errors, left_out, quantiles, shipped
from silicon.writing import DATA, SYSTEMS

from partool.catalog.silicon.grid import entries
from partool.cost.silicon.attention import GENERATIONS, catalog_flops
from partool.cost.time.attention import equation_flops

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "silicon_attention.json"
_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def main() -> None:
    """Write figures by table, and by device and kernel with all widths together."""
    tables: dict[str, Any] = {}
    pooled: dict[str, dict[str, list[Floats]]] = {}
    for rows in read():
        name = f"{rows.device}/bf16/{rows.kernel}"
        parts = pooled.setdefault(name, {})
        for kind, part in (("all", rows.taken(rows.window == 0)), ("windows", rows.taken(rows.window > 0))):
            if not len(part.seconds):
                continue
            found = {"shipped": errors(part, shipped(part))}
            if kind == "all":
                found |= {f"{axis} left out": left_out(part, axis) for axis in LEFT_OUT}
                found["equation"] = equation_errors(part)
            tables[f"{name}/{rows.width}/{kind}"] = {
                each: quantiles(error) | _spread(error) for each, error in found.items()
            }
            for each, error in found.items():
                parts.setdefault(f"{kind}, {each}", []).append(error)
    kernels = {
        name: {each: quantiles(np.concatenate(errors)) for each, errors in parts.items()}
        for name, parts in pooled.items()
    }
    dropped = {name: entry["dropped"] | {"rows": entry["rows"]} for name, entry in entries("attention").items()}
    result = {"kernels": kernels, "tables": tables, "spread between frameworks": dict(_frameworks()), "rows": dropped}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def equation_errors(rows: Rows) -> Floats:
    """Return relative errors of the equation that prices devices without tables; it has no cache to write."""
    long = rows.taken(rows.length >= 1024)
    generation = GENERATIONS[rows.kernel]
    width = int(rows.width.split("+")[0])
    return (long.flops / equation_flops(catalog_flops(rows.device), generation, width) + 5e-6) / long.seconds - 1.0


def _spread(error: Floats) -> dict[str, list[float]]:
    return {"quantiles of the ratio": np.quantile(1.0 + error, _LEVELS).round(3).tolist()}


def _frameworks() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield, by device and head width, how far other frameworks' kernels are from vLLM's at the same points."""
    columns = ["batch_size", "isl", "num_heads", "num_key_value_heads"]
    for system, device in SYSTEMS.items():
        kept = [("system", "==", system), ("isl", ">=", 1024)]
        points: dict[tuple[float, ...], dict[str, float]] = {}
        for row in pq.read_table(DATA / "attention_forward.parquet", filters=kept).to_pylist():
            if not row["window_size"] and row["head_dim"] in (64, 128):
                point = (row["head_dim"], *(row[name] for name in columns))
                points.setdefault(point, {})[row["framework"]] = row["latency"]
        for width in (64, 128):
            for other in ("SGLang", "TRTLLM"):
                ratios = [each[other] / each["VLLM"] for point, each in points.items()
                          if point[0] == width and {other, "VLLM"} <= set(each)]  # fmt: skip
                if ratios:
                    yield f"{device}/{width}/{other}", quantiles(np.array(ratios) - 1.0)


if __name__ == "__main__":
    main()

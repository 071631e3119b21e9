"""Distils measured attention of prompts into ``partool/catalog/silicon/attention.json`` and ``attention.npz``.

Run ``PYTHONPATH=tests python -m silicon.attention`` where the folder of measurements is (:data:`silicon.writing.DATA`).

A measurement is one layer's causal attention in an inference engine. The engine also writes the keys and values of the
prompt into its paged cache, which training does not do. The seconds are therefore split into those of the kernel, which
depend on the length and on the number of heads of all sequences, and those of writing the cache, which are linear in
its bytes and tokens. Tables hold the kernel's seconds; the other part is kept for judging (:data:`CACHE_FILE`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from silicon.attention_fit import COLUMNS, HEADS, LENGTHS, Rows, split
from silicon.writing import DATA, SYSTEMS, origin, write

from partool.catalog.silicon.grid import MeasuredGrid

CACHE_FILE = Path(__file__).parents[1] / "data" / "silicon" / "attention_cache.json"
"""Table's device, kernel and head width → :attr:`Split.cache`."""
KERNELS = ("vllm_flash_attn", "vllm_flash_attn_fa2", "vllm_flash_attn_fa3", "vllm_flashinfer_trtllmprefill")
"""vLLM's kernels: one for each device, over the most head widths and windows."""
LATENT = {
    "a100_sxm": "TRTLLM", "l40s": "TRTLLM", "rtx_pro_6000_server": "TRTLLM", "h100_sxm": "TRTLLM",
    "h200_sxm": "TRTLLM", "b200_sxm": "SGLang", "b300_sxm": "SGLang", "gb200": "SGLang", "gb300": "SGLang",
}  # fmt: skip
"""System → framework whose kernel of latent attention prices it. On Hopper SGLang's kernel works on compressed keys and
values of 576 and 512 elements, which training does not do: it takes three times as long."""
LATENT_WIDTHS = (192, 128)
"""Elements of a latent query or key and of a value (DeepSeek-V3)."""
WINDOWS = (0, 128, 1024)
"""Windows that have tables. Windows of 8,192 were measured at four lengths only, on some devices as chunks."""


def read(device: str | None = None) -> Iterator[Rows]:
    """Yield the measurements of each device, kernel and head width that has tables; repeats are their median."""
    systems = [system for system, name in SYSTEMS.items() if device in (None, name)]
    for table in (_plain(systems), _latent(systems)):
        keys = np.array([f"{row['system']}|{row['kernel_source']}|{row['framework']} {row['version']}|{row['width']}"
                         for row in table])  # fmt: skip
        for key in sorted(set(keys.tolist())):
            system, kernel, framework, width = key.split("|")
            mine = [table[place] for place in np.flatnonzero(keys == key)]
            columns = {name: np.array([row[name] for row in mine], float) for name in COLUMNS}
            rows = Rows(SYSTEMS[system], kernel, framework, width, **columns)
            yield _repeats(rows.taken(np.isin(rows.window, WINDOWS)))


def _plain(systems: list[str]) -> list[dict[str, Any]]:
    kept = [("system", "in", systems), ("kernel_source", "in", KERNELS)]
    return [
        {
            **row, "width": str(row["head_dim"]), "batch": row["batch_size"], "length": row["isl"],
            "heads": row["num_heads"], "key_heads": row["num_key_value_heads"], "window": row["window_size"] or 0.0,
            "seconds": row["latency"] * 1e-3,
        }
        for row in pq.read_table(DATA / "attention_forward.parquet", filters=kept).to_pylist()
    ]  # fmt: skip


def _latent(systems: list[str]) -> list[dict[str, Any]]:
    kept = [("system", "in", systems), ("op_name", "==", "mla_context"), ("kv_cache_dtype", "==", "bfloat16")]
    return [
        {
            **row, "width": "+".join(map(str, LATENT_WIDTHS)), "batch": row["batch_size"], "length": row["isl"],
            "heads": row["num_heads"], "key_heads": 0.0, "window": 0.0, "seconds": row["latency"] * 1e-3,
        }
        for row in pq.read_table(DATA / "mla.parquet", filters=kept).to_pylist()
        if row["isl"] >= LENGTHS[0] and LATENT[row["system"]] == row["framework"]
    ]  # fmt: skip


def _repeats(rows: Rows) -> Rows:
    points = np.stack([getattr(rows, name) for name in COLUMNS[:-1]], axis=1)
    _, first, place = np.unique(points, axis=0, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    order = np.argsort(place, kind="stable")
    groups = np.split(rows.seconds[order], np.cumsum(np.bincount(place))[:-1])
    one = rows.taken(np.isin(np.arange(len(place)), first))
    medians = np.array([np.median(group) for group in groups])
    one.seconds = medians[place[np.sort(first)]]
    one.dropped["repeats"] = len(place) - len(first)
    return one


SAMPLE = CACHE_FILE.with_name("attention.csv.gz")
"""Measurements that tests compare tables with where the folder of measurements is not."""
_SEED, _EACH = 50, 5


def sample(rows: Rows) -> Rows:
    """Return a few measurements of training's lengths, of each window and of each band of lengths and heads.

    They lie off the grid where measurements do: latent attention was measured at the grid's points only.
    """
    pick = np.random.default_rng(_SEED)
    off = ~np.isin(rows.work, HEADS) if rows.key_heads.any() else np.ones(len(rows.work), bool)
    bands = np.stack([rows.window, np.digitize(rows.length, [1024, 3072, 8192]), np.digitize(rows.work, [32, 256])])
    chosen = np.zeros(len(rows.work), bool)
    for band in np.unique(bands[:, off & (rows.length >= LENGTHS[3])], axis=1).T:
        places = np.flatnonzero((bands == band[:, None]).all(axis=0) & off & (rows.length >= LENGTHS[3]))
        chosen[pick.permutation(places)[:_EACH]] = True
    return rows.taken(chosen)


def write_sample(samples: list[Rows]) -> int:
    """Write the sample; the same measurements give the same bytes."""
    lines = ["table,batch,length,heads,key_heads,window,seconds"]
    for rows in samples:
        table = f"{rows.device}/bf16/{rows.kernel}/{rows.width}"
        for values in zip(*(getattr(rows, name) for name in COLUMNS), strict=True):
            lines.append(",".join([table, *(f"{value:.6g}" for value in values)]))
    SAMPLE.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", 9, mtime=0))
    return SAMPLE.stat().st_size


def read_sample() -> Iterator[Rows]:
    """Yield the committed sample, by kernel and head width."""
    lines = [line.split(",") for line in gzip.decompress(SAMPLE.read_bytes()).decode().splitlines()[1:]]
    for table in sorted({line[0] for line in lines}):
        device, _, kernel, width = table.split("/")
        values = np.array([line[1:] for line in lines if line[0] == table], float)
        columns = dict(zip(COLUMNS, values.T, strict=True))
        yield Rows(device, kernel, "", width, **columns)


def main() -> None:
    """Write the tables, the cost of caches and the sample; print their number and bytes."""
    grids: dict[str, MeasuredGrid] = {}
    caches: dict[str, list[float]] = {}
    samples: list[Rows] = []
    for rows in read():
        samples.append(sample(rows))
        fitted = split(rows)
        name = f"{rows.device}/bf16/{rows.kernel}/{rows.width}"
        caches[name] = [float(f"{value:.4g}") for value in fitted.cache]
        for window, log_s in fitted.log_s.items():
            where = origin(rows.device, rows.kernel, rows.framework, int(np.sum(rows.window == window)), rows.dropped)
            axes = {"length": LENGTHS, "heads": HEADS}
            grids[f"{name}/{window or 'all'}"] = MeasuredGrid(axes, log_s, where)
    CACHE_FILE.parent.mkdir(parents=True, exist_ok=True)
    CACHE_FILE.write_text(json.dumps(caches, indent=1) + "\n", encoding="utf-8")
    print(len(grids), "tables,", write("attention", grids), "bytes, sample", write_sample(samples), "bytes")


if __name__ == "__main__":
    main()

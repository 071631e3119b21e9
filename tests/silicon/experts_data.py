"""Reads and cleans measured layers of experts: rows by table, with what the distilled curves are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from writing import AICONFIGURATOR, DATA, SYSTEMS

from partool.catalog.lookup import table
from partool.catalog.silicon.experts import Rates, Sizes, equation_s

KERNELS = {
    "moe_torch_flow_cutlass": "cutlass", "moe_torch_flow": "cutlass", "moe_torch_flow_nongated": "cutlass-plain",
    "moe_torch_flow_triton_fp8_block": "triton", "vllm_fused_moe": "triton",
    "vllm_unquantizedfusedmoe_triton_tritonexperts": "triton", "vllm_fp8moe_triton_tritonexperts": "triton",
    "vllm_modeloptfp8moe_triton_tritonexperts": "triton", "sglang_fused_moe_triton": "triton-sglang",
    "deepgemm": "deepgemm", "sglang_flashinfer_trtllm_moe": "trtllm-gen",
}  # fmt: skip
"""Source of a kernel → family. Left out are vLLM's and SGLang's calls of FlashInfer, which hold few shapes of kernels
that TensorRT-LLM's rows have as well; they serve to show how far frameworks are apart."""
OTHER_CALLS = {
    "cutlass": ("flashinfer_cutlass",), "trtllm-gen": ("flashinfer_trtllm",), "cutlass-plain": (), "triton": (),
    "triton-sglang": (), "deepgemm": (),
}  # fmt: skip
"""Family → parts of names of the same kernels as other frameworks call them."""
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block"}
ALPHA = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
"""Distribution of tokens over experts → exponent of the power law that experts' loads are drawn from."""
LEAST_TOKENS = 256
"""Fewer tokens than a training step has; kernels switch to other variants there."""
_ISOLATED = 0.35
"""Distance in logarithms from the median of four neighbours in the number of tokens beyond which a row is dropped."""
_SLOW = 1.8
"""Seconds relative to the least of another version's and the sister device's beyond which a row is dropped; 1.43 is the
ratio of H200's memory bandwidth to H100's."""
_SISTERS = {"h100-sxm": "h200", "b200": "gb200", "b300": "gb300"}
"""Devices with the same chip."""
_AITER = "ROCm/aiter e4048607 (aiter/configs)"


@dataclass
class Rows:
    """Measured layers of one table, a column each."""

    device: str
    dtype: str
    kernel: str
    framework: str
    source: str
    licence: str
    columns: dict[str, NDArray[np.float64]]
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.device}/{self.dtype}/{self.kernel}"

    @property
    def gated(self) -> bool:
        return self.kernel != "cutlass-plain"

    @property
    def element_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 1

    @property
    def rates(self) -> Rates:
        return rates(self.device, self.dtype)

    @property
    def sizes(self) -> Sizes:
        c = self.columns
        return Sizes(c["each"], c["experts"], c["hidden"], c["inner"], self.gated)

    def where(self, mask: NDArray[np.bool_]) -> Rows:
        columns = {name: column[mask] for name, column in self.columns.items()}
        return Rows(
            self.device, self.dtype, self.kernel, self.framework, self.source, self.licence, columns, self.dropped
        )


def rates(device: str, dtype: str) -> Rates:
    """Return the catalog's rates of a device in a precision."""
    entry = table("accelerators")[device]
    tflops = entry["achievable_tflops"]["bf16" if dtype == "bf16" else "fp8"]
    return Rates(tflops * 1e12, entry["memory_gb_per_s"] * 1e9)


@cache
def load(experts: int, top_k: int, ranks: int, tokens: int, alpha: float) -> float:
    """Return the mean load of the busiest of ``ranks`` ranks relative to the mean rank, over 100 draws.

    Rows with expert parallelism hold the busiest rank. The loads of experts are drawn from a power law between 1 and
    0.8 times the tokens, as the source's collector does (``helper.py`` of aiconfigurator).
    """
    if ranks == 1 or alpha == 0.0:
        return 1.0
    random = np.random.default_rng([experts, top_k, ranks, tokens])
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    power = 1.0 - alpha
    drawn = ((high**power - low**power) * random.random((100, experts)) + low**power) ** (1.0 / power)
    groups = drawn.reshape(100, ranks, -1).sum(axis=2)
    return float(np.mean(groups.max(axis=1) / groups.mean(axis=1)))


class _Measured:
    """Columns of the file of NVIDIA's measurements; texts as codes and their names."""

    def __init__(self) -> None:
        read = pq.read_table(DATA / "moe.parquet")
        many = np.asarray(read.column("num_tokens")) >= LEAST_TOKENS
        self.names: dict[str, list[str]] = {}
        self.columns: dict[str, NDArray[np.float64]] = {}
        for name in read.column_names:
            column = read.column(name)
            if str(column.type).endswith("string"):
                coded = column.combine_chunks().dictionary_encode()
                self.names[name] = coded.dictionary.to_pylist()
                self.columns[name] = np.asarray(coded.indices).astype(float)[many]
            elif not name.startswith("power"):
                self.columns[name] = np.asarray(column, dtype=float)[many]

    def among(self, name: str, values: Iterable[str]) -> NDArray[np.bool_]:
        """Return True where the text of a column is one of ``values``."""
        wanted = set(values)
        return np.isin(self.columns[name], [code for code, text in enumerate(self.names[name]) if text in wanted])

    def texts(self, name: str, mask: NDArray[np.bool_]) -> list[str]:
        """Return the different texts of a column's rows."""
        return sorted(self.names[name][int(code)] for code in np.unique(self.columns[name][mask]))


@cache
def measured() -> _Measured:
    return _Measured()


def nvidia(other_calls: bool = False) -> list[Rows]:
    """Return the cleaned rows of NVIDIA's devices by table, or with ``other_calls`` those of other frameworks."""
    read, tables = measured(), []
    for system, device in SYSTEMS.items():
        for dtype, short in DTYPES.items():
            here = read.among("system", [system]) & read.among("moe_dtype", [dtype])
            for kernel in sorted(set(KERNELS.values())):
                sources = [source for source, family in KERNELS.items() if family == kernel]
                if other_calls:
                    parts = OTHER_CALLS.get(kernel, ())
                    every = read.names["kernel_source"]
                    sources = [x for x in every if x.startswith(("vllm", "sglang")) and any(p in x for p in parts)]
                    sources = [source for source in sources if source not in KERNELS]
                mask = here & read.among("kernel_source", sources)
                if np.any(mask):
                    tables.append(_table(read, mask, device, short, kernel))
    named = {rows.name: rows for rows in tables}
    sisters = _SISTERS | {two: one for one, two in _SISTERS.items()}
    pairs = [(rows, named.get(rows.name.replace(rows.device, sisters.get(rows.device, "")))) for rows in tables]
    return [_without_isolated(_without_slow(rows, sister)) for rows, sister in pairs]


def _without_slow(rows: Rows, sister: Rows | None) -> Rows:
    """Return the rows without those that take much longer than another measurement of the same layer.

    Such rows hold a variant of a kernel that the framework's tuning chose badly in one run.
    """
    least: dict[tuple[float, ...], float] = {}
    for part in (rows, sister):
        for key, seconds in zip(keys(part), part.columns["seconds"].tolist(), strict=True) if part else ():
            least[key] = min(seconds, least.get(key, seconds))
    others = np.array([least[key] for key in keys(rows)])
    slow = rows.columns["seconds"] > _SLOW * others
    kept = rows.where(~slow)
    if np.any(slow):
        kept.dropped["much slower than another measurement"] = int(np.sum(slow))
    return kept


def keys(rows: Rows) -> list[tuple[float, ...]]:
    """Return what was measured in each row."""
    names = ("hidden", "all_inner", "inner", "all_experts", "top_k", "ranks", "alpha", "tokens")
    return list(zip(*(rows.columns[name].tolist() for name in names), strict=True))


def _table(read: _Measured, mask: NDArray[np.bool_], device: str, dtype: str, kernel: str) -> Rows:
    """Return the cleaned rows of one table."""
    versions = read.texts("version", mask)
    framework = " and ".join(read.texts("framework", mask)) + " " + ", ".join(versions)
    dropped = {}
    # SGLang 0.5.10 computes the experts of all ranks, so its time does not fall with the number of ranks.
    every = mask & read.among("version", ["0.5.10"]) & (read.columns["moe_ep_size"] > 1)
    every &= read.among("kernel_source", ["sglang_fused_moe_triton"])
    if np.any(every):
        dropped["experts of all ranks computed"] = int(np.sum(every))
    mask = mask & ~every
    raw = {name: column[mask] for name, column in read.columns.items()}
    alpha = np.array([ALPHA[name] for name in read.names["distribution"]])[raw["distribution"].astype(int)]
    cases = np.stack([raw["num_experts"], raw["topk"], raw["moe_ep_size"], raw["num_tokens"], alpha], axis=1)
    different, place = np.unique(cases, axis=0, return_inverse=True)
    loads = np.array([load(*(int(part) for part in case[:4]), float(case[4])) for case in different])[place.ravel()]
    choices, ranks = raw["num_tokens"] * raw["topk"], raw["moe_ep_size"]
    columns = {
        "hidden": raw["hidden_size"], "inner": np.rint(raw["inter_size"] / raw["moe_tp_size"]),
        "experts": np.maximum(np.rint(raw["num_experts"] / ranks), 1.0), "each": choices * loads / raw["num_experts"],
        "elsewhere": np.maximum(choices - choices * loads / ranks, 0.0), "tokens": raw["num_tokens"],
        "alpha": alpha, "ranks": ranks, "top_k": raw["topk"], "all_experts": raw["num_experts"],
        "all_inner": raw["inter_size"], "version": raw["version"], "seconds": raw["latency"] * 1e-3,
    }  # fmt: skip
    return Rows(device, dtype, kernel, framework, AICONFIGURATOR, "Apache-2.0", columns, dropped)


def amd() -> list[Rows]:
    """Return the rows of AMD's devices by table: 16-bit layers, and eight bits with scales of blocks of 128."""
    read = pq.read_table(DATA / "amd_moe.parquet").to_pylist()
    tables = []
    for units, gfx, device in ((304, "gfx942", "mi300x"), (256, "gfx950", "mi355x")):
        for scales, dtype in (("QuantType.No", "bf16"), ("QuantType.per_1x128", "fp8-block")):
            here = [x for x in read if (x["gfx"], x["cu_num"], x["q_type"]) == (gfx, units, scales)]
            # One expert more than a power of two is a shared expert, which all tokens choose: the load is not even.
            kept = [x for x in here if x["expert"] % 2 == 0 and x["token"] >= LEAST_TOKENS and x["us"] > 0]
            columns = {name: np.array([float(x[key]) for x in kept]) for name, key in (
                ("hidden", "model_dim"), ("inner", "inter_dim"), ("experts", "expert"), ("tokens", "token"),
                ("top_k", "topk"), ("all_experts", "expert"), ("all_inner", "inter_dim"), ("us", "us"))}  # fmt: skip
            columns["each"] = columns["tokens"] * columns["top_k"] / columns["experts"]
            columns["seconds"] = columns.pop("us") * 1e-6
            columns |= dict.fromkeys(("elsewhere", "alpha", "version"), np.zeros(len(kept)))
            columns["ranks"] = np.ones(len(kept))
            few = sum(x["token"] < LEAST_TOKENS for x in here)
            dropped = {"an expert shared by all tokens": len(here) - len(kept) - few}
            rows = Rows(device, dtype, "ck", "aiter e4048607", _AITER, "MIT", columns, dropped)
            tables.append(_without_isolated(rows))
    return tables


def base_s(rows: Rows) -> NDArray[np.float64]:
    """Return what measured seconds are relative to: the equation, and work for experts that are elsewhere.

    Triton kernels of inference engines activate and sum the rows of all experts, whatever the rank holds.
    """
    seconds = equation_s(rows.sizes, rows.rates, rows.element_bytes)
    if rows.kernel.startswith("triton"):
        c = rows.columns
        moved = 2.0 * c["elsewhere"] * (2.0 * c["hidden"] + 4.0 * c["inner"])
        seconds = seconds + moved / (0.85 * rows.rates.bytes_per_s)
    return np.asarray(seconds)


def _without_isolated(rows: Rows) -> Rows:
    """Return the rows without those far from their four neighbours in the number of tokens."""
    c = rows.columns
    log = np.log(c["seconds"] / base_s(rows))
    series = np.stack(
        [c[name] for name in ("hidden", "all_inner", "inner", "all_experts", "top_k", "ranks", "alpha", "version")]
    )
    order = np.lexsort((c["tokens"], *series))
    same = np.concatenate([[-1], np.cumsum(np.any(np.diff(series[:, order], axis=1) != 0, axis=0))])
    same[0] = 0
    ordered, near = log[order], np.full((4, len(log)), np.nan)
    for place, step in enumerate((-2, -1, 1, 2)):
        at = np.arange(len(log)) + step
        inside = (at >= 0) & (at < len(log))
        inside[inside] &= same[at[inside]] == same[np.flatnonzero(inside)]
        near[place, inside] = ordered[at[inside]]
    some = np.sum(~np.isnan(near), axis=0) >= 2
    apart = np.zeros(len(log))
    apart[some] = np.abs(ordered[some] - np.nanmedian(near[:, some], axis=0))
    keep = np.ones(len(log), bool)
    keep[order[apart > _ISOLATED]] = False
    kept = rows.where(keep)
    kept.dropped["isolated"] = int(np.sum(~keep))
    return kept

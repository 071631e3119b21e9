"""Prices of matrix products from tables of measured kernels, against rows that the tables do not have."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import new_layout
from planned import plan_of

from partool.catalog.hardware import resolve_hardware
from partool.catalog.silicon.grid import STEP, entries, grid
from partool.cost.codec import encode
from partool.cost.kinds import kinds
from partool.cost.silicon.products import origin, product_table, quantises, scale_s
from partool.cost.time.gemm import equations_s, matmul_s
from partool.cost.time.layer import layer
from partool.plan.layout import Mesh
from partool.spec.hardware import HardwareSpec
from partool.spec.model import ModelConfig
from partool.work.stack import Stack
from partool.work.stacks import PARTOOL, STACKS, scaled_by
from partool.work.training import TrainingWork

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests/data/silicon/products.csv.gz"
DATA = ROOT.parent / "shared/data/silicon/gemm.parquet"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the folder of published measurements is not here")
MODEL = ModelConfig(layers=2, hidden=4096, ffn_hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
PLACES = ((8192.0, 14336.0, 4096.0), (512.0, 4096.0, 8192.0), (40000.0, 128256.0, 4096.0), (64.0, 16.0, 200000.0))
TABLES = sorted(name for name in entries("products") if not name.endswith(("unaligned", "scale")))
BARS = {
    "bf16/linear": (6, 16), "fp8/scaled_mm": (6, 17), "fp8_block/deepgemm": (10, 38), "fp8_block/trtllm": (6, 18),
    "bf16/aiter": (6, 25), "fp8/aiter": (5, 25), "fp8_block/aiter": (5, 25),
}  # fmt: skip
"""Median and 90th percentile of the errors of large products, in per cent."""


def job(
    device: str, table: str = "bf16", *, stack: Stack = PARTOOL, short: bool = False, **figures: Any
) -> TrainingWork:
    """Return work on a device in a table's precision; ``short`` without a power limit, as measurements are."""
    precision: Any = "fp8" if table.startswith("fp8") else table.split("/", maxsplit=1)[0]
    devices = resolve_hardware(HardwareSpec(accelerator=device, nodes=1, **figures), precision).devices
    assert devices is not None
    if short:
        devices = devices.model_copy(update={"sustained_share": 1.0})
    if table.startswith("fp8_block"):
        stack = replace(stack, fp8_kernel="block")
    return TrainingWork(MODEL, devices, sequence_length=4096, global_batch=8, precision=precision, stack=stack)


def sample() -> dict[tuple[str, str], np.ndarray]:
    """Return (device, table) → rows of m, n, k and measured seconds."""
    rows = defaultdict(list)
    for row in csv.DictReader(gzip.decompress(SAMPLE.read_bytes()).decode().splitlines()):
        sizes = [float(row[name]) for name in ("m", "n", "k")]
        rows[row["device"], row["table"]].append([*sizes, 1e-6 * float(row["microseconds"])])
    return {key: np.array(each) for key, each in rows.items()}


def ratios(device: str, table: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted / measured by the table and by the equations."""
    work = job(device, table, short=True)
    priced = product_table(work)
    assert priced is not None
    if priced.name != f"{device}/{table}":
        pytest.fail(f"{device}/{table} prices nothing: {priced.name} does")
    m, n, k, measured = rows.T
    predicted = priced.seconds(m, n, k) - priced.flop_s * (2.0 * m * n * k)
    return predicted / measured, equations_s(work, m, n, k) / measured


@pytest.mark.parametrize("table", sorted(BARS))
def test_a_sample_off_the_grid_is_priced_as_it_was_measured(table: str) -> None:
    """Measured products whose m no table has: errors of large ones below the bars, and below the equations'."""
    by_table, by_equations, small = [], [], []
    for (device, name), rows in sample().items():
        if name == table:
            large = (rows[:, 0] >= 1024) & (rows[:, 1] >= 512) & (rows[:, 2] >= 512)
            predicted, equations = ratios(device, table, rows)
            by_table.append(np.abs(predicted - 1.0)[large])
            by_equations.append(np.abs(equations - 1.0)[large])
            small.append(np.abs(predicted - 1.0)[~large])
            assert np.median(by_table[-1]) < 0.02 * BARS[table][0], device
    errors, median, p90 = np.concatenate(by_table), *BARS[table]
    assert 100 * np.median(errors) <= median
    assert 100 * np.quantile(errors, 0.9) <= p90
    assert np.median(errors) < np.median(np.concatenate(by_equations))
    if sum(map(len, small)):
        assert np.median(np.concatenate(small)) < 0.1


@pytest.mark.parametrize("name", TABLES)
def test_prices_are_positive_monotone_and_continuous(name: str) -> None:
    """Along aligned m, inside a table and far beyond it; no jump where a table ends."""
    device, table = name.split("/", 1)
    for figures in ({}, {"achievable_tflops": 100.0}, {"memory_gb_per_s": 400.0}):
        work = job(device, table, **figures)
        rows = np.concatenate([np.arange(1.0, 17.0), np.arange(32.0, 200_000.0, 224.0)])
        for n, k in ((4096.0, 4096.0), (14336.0, 4096.0), (64.0, 130_000.0), (100_000.0, 96.0)):
            seconds = matmul_s(work, rows, n, k)
            assert np.all(seconds > 0.0)
            assert np.all(np.diff(seconds) >= -1e-12 * seconds[1:])
        of = product_table(work)
        assert of is not None
        for axis, values in enumerate(of.measured.grid.axes.values()):
            for edge in (values[0], values[-1]):
                # Widths of multiples of 32 only, as misaligned widths take longer by a step.
                at = np.array([[4096.0, 4096.0, 4096.0]] * 2)
                at[:, axis] = edge * np.array([1 - 1e-9, 1 + 1e-9])
                inside, beyond = of.seconds(*at.T)
                assert beyond == pytest.approx(inside, rel=1e-6)
    assert matmul_s(job(device, table), 0.0, 0.0, 0.0) > 0.0
    far, farther = (matmul_s(job(device, table), rows, 131072.0, 131072.0) for rows in (2.0**18, 2.0**19))
    assert farther == pytest.approx(2.0 * far, rel=0.02)


def test_columns_and_numbers_have_the_same_price() -> None:
    work = job("h100-sxm")
    m, n, k = (np.array([place[side] for place in PLACES]) for side in range(3))
    column = matmul_s(work, m, n, k)
    assert column == pytest.approx([float(matmul_s(work, *place)) for place in PLACES], rel=1e-12)
    mixed = matmul_s(work, m, 4096.0, k)
    assert mixed == pytest.approx(
        [float(matmul_s(work, rows, 4096.0, inner)) for rows, inner in zip(m, k, strict=True)]
    )


def test_only_the_name_of_a_device_picks_a_table_and_its_memory_size_changes_no_price() -> None:
    work, smaller = job("h100-sxm"), job("h100-sxm", memory_gib=40.0)
    assert smaller.devices.memory_bytes < work.devices.memory_bytes
    assert [matmul_s(work, *place) for place in PLACES] == [matmul_s(smaller, *place) for place in PLACES]
    own = job("mine", backend="cuda", peak_tflops=989.0, memory_gib=80.0, memory_gb_per_s=3350.0)
    assert product_table(own) is None
    assert matmul_s(own, *PLACES[0]) == equations_s(own, *PLACES[0])


def test_rates_of_a_spec_scale_the_table() -> None:
    """Half the rate of both parts is twice the time; a large product follows FLOP/s, a thin one the memory."""
    work, large, thin = job("a100-80"), (8192.0, 8192.0, 8192.0), (16.0, 16384.0, 16384.0)
    rates = {"achievable_tflops": 0.5 * 271.0, "memory_gb_per_s": 0.5e-9 * work.devices.memory_bytes_per_s}
    for place in (large, thin):
        assert matmul_s(job("a100-80", **rates), *place) == pytest.approx(2.0 * matmul_s(work, *place))
    slower = job("a100-80", achievable_tflops=rates["achievable_tflops"])
    assert matmul_s(slower, *large) == pytest.approx(2.0 * matmul_s(work, *large), rel=0.05)
    assert matmul_s(slower, *thin) < 1.15 * matmul_s(work, *thin)
    narrow = job("a100-80", memory_gb_per_s=rates["memory_gb_per_s"])
    assert matmul_s(narrow, *thin) > 1.6 * matmul_s(work, *thin)
    assert matmul_s(narrow, *large) < 1.15 * matmul_s(work, *large)


def test_a_relative_has_the_table_of_the_measured_device_in_its_own_rates() -> None:
    """H20 has a fifth of H100's FLOP/s and 1.2 times its memory bandwidth."""
    h20, h100 = job("h20"), job("h100-sxm", short=True)
    priced = product_table(h20)
    assert priced is not None
    assert priced.name == "h100-sxm/bf16/linear"
    rate = 2.0 * 8192.0**3 / matmul_s(h20, 8192.0, 8192.0, 8192.0)
    assert rate == pytest.approx(h20.devices.achievable_flops * h20.devices.sustained_share, rel=0.12)
    thin = (1.0, 16384.0, 16384.0)
    faster = h20.devices.memory_bytes_per_s / h100.devices.memory_bytes_per_s
    assert matmul_s(h20, *thin) == pytest.approx(matmul_s(h100, *thin) / faster, rel=0.05)


def test_large_products_take_the_sustained_rate_over_a_whole_step() -> None:
    for device in ("h100-sxm", "h200", "b200", "gb300"):
        work = job(device)
        seconds = 2.0 * 8192.0**3 / (work.devices.achievable_flops * work.devices.sustained_share)
        assert matmul_s(work, 8192.0, 8192.0, 8192.0) == pytest.approx(seconds, rel=0.1), device
        thin = (16.0, 16384.0, 16384.0)
        assert matmul_s(work, *thin) == pytest.approx(matmul_s(job(device, short=True), *thin), rel=0.03)


def test_rows_that_are_no_multiple_of_16_have_their_own_ratio() -> None:
    """DeepGEMM and CUTLASS on H100 start another tile for one more row; multiples of 16 do not feel it."""
    work = job("h100-sxm", "fp8", short=True)
    assert matmul_s(work, 129.0, 16384.0, 16384.0) > 1.2 * matmul_s(work, 128.0, 16384.0, 16384.0)
    assert matmul_s(work, 144.0, 16384.0, 16384.0) < 1.1 * matmul_s(work, 128.0, 16384.0, 16384.0)
    column = matmul_s(work, np.array([128.0, 129.0, 144.0]), 16384.0, 16384.0)
    assert column[1] == pytest.approx(float(matmul_s(work, 129.0, 16384.0, 16384.0)))
    assert column[1] > column[2]


def test_precisions_and_kernels_pick_their_tables() -> None:
    names = {
        ("h100-sxm", "bf16"): "h100-sxm/bf16/linear", ("h100-sxm", "fp8"): "h100-sxm/fp8/scaled_mm",
        ("h100-sxm", "fp8_block"): "h100-sxm/fp8_block/deepgemm", ("l40s", "fp8_block"): "l40s/fp8_block/trtllm",
        ("mi300x", "fp8"): "mi300x/fp8_block/aiter", ("h800", "fp16"): "h100-sxm/bf16/linear",
    }  # fmt: skip
    for (device, table), name in names.items():
        priced = product_table(job(device, table))
        assert priced is not None
        assert priced.name == name
    assert product_table(job("h100-sxm", "fp32")) is None
    assert product_table(job("mi300x")) is None  # nobody published its bf16 products
    fp8, bf16 = job("h100-sxm", "fp8"), job("h100-sxm")
    place = PLACES[0]
    assert matmul_s(fp8, *place, wide=True) == pytest.approx(float(matmul_s(bf16, *place)))
    assert matmul_s(fp8, *place) < 0.7 * matmul_s(bf16, *place)
    assert matmul_s(job("h100-sxm", stack=STACKS["megatron"]), *place) == matmul_s(bf16, *place)


@pytest.mark.parametrize(("device", "waved"), [("a100-80", True), ("h100-sxm", False)])
def test_seconds_follow_waves_of_tiles_between_measured_sizes(device: str, waved: bool) -> None:
    """9 × 12 tiles of 128 × 256 are one wave on 108 multiprocessors, 10 × 12 are two; 1,152 rows are between points."""
    work = job(device, short=True)
    seconds = [matmul_s(work, rows, 3072.0, 8192.0) for rows in (1040.0, 1136.0, 1168.0, 1264.0)]
    before, step, after = (seconds[place + 1] / seconds[place] for place in range(3))
    assert bool(step > 1.15 * max(before, after)) == waved


def test_concurrent_products_cost_the_equations_ratio() -> None:
    work, place = job("h100-sxm"), (256.0, 1024.0, 4096.0)
    ratio = equations_s(work, *place, batch=8) / equations_s(work, *place)
    assert matmul_s(work, *place, batch=8) == pytest.approx(ratio * matmul_s(work, *place))


def test_misaligned_widths_cost_more_and_measured_ones_do_not() -> None:
    work = job("h100-sxm")
    whole = matmul_s(work, 4096.0, 4096.0, 4096.0)
    assert matmul_s(work, 4096.0, 4096.0 + 32, 4096.0) < 1.05 * whole
    assert matmul_s(work, 4096.0, 4096.0 + 8, 4096.0) > 1.1 * whole


def test_the_quantisation_of_inputs_is_counted_once() -> None:
    """Products of fp8 tables contain it; beside them only scales are computed, and none where scales are by block."""
    layout = new_layout(
        mesh=Mesh(), zero=0, micro_batch=1, accumulation=8, recompute=("none",) * 2, compile="block", stages=((0, 2),)
    )
    layouts, kind = encode(layout), next(iter(kinds(MODEL)))
    tensor, block, bf16 = (job("h100-sxm", table) for table in ("fp8", "fp8_block", "bf16"))
    parts = [float(layer(work, layouts, kind).forward.elementwise_s) for work in (tensor, block, bf16)]
    assert quantises(tensor)
    assert quantises(block)
    assert not quantises(bf16)
    assert parts[1] == pytest.approx(parts[2])
    rows = 4096.0
    scales = 2 * scale_s(tensor, rows, 4096.0) + scale_s(tensor, rows, 14336.0)
    assert parts[0] - parts[2] == pytest.approx(PARTOOL.derate * float(scales), rel=0.3)


def test_prices_say_where_they_come_from() -> None:
    assert origin(job("a100-80"), 4096, 4096, 4096).kind == "measured"
    assert origin(job("a100-80"), 4096, 4352, 4096).kind == "interpolated"
    clocks = origin(job("h100-sxm"), 4096, 4096, 4096)
    assert (clocks.kind, "clocks over a whole step" in clocks.text) == ("scaled", True)
    assert origin(job("h20"), 4096, 4096, 4096).text.endswith("for the rates of h20")
    assert "beyond its sizes" in origin(job("a100-80"), 4096, 128256, 4096).text
    assert "8 at once" in origin(job("a100-80"), 4096, 4096, 4096, batch=8).text
    assert "fp16 as bf16" in origin(job("a100-80", "fp16"), 4096, 4096, 4096).text
    assert "misaligned" in origin(job("a100-80"), 4096, 4100, 4096).text
    assert "transformer-engine" in origin(job("a100-80", stack=STACKS["megatron"]), 4096, 4096, 4096).text
    blocks = scaled_by(STACKS["megatron"], "blockwise")
    assert "DeepGEMM" in origin(job("h100-sxm", "fp8", stack=blocks), 4096, 4096, 4096).text
    assert "DeepGEMM" not in origin(job("h100-sxm", "fp8", stack=STACKS["megatron"]), 4096, 4096, 4096).text
    assert origin(job("mi355x"), 4096, 8192, 8192).kind == "interpolated"  # not every pair of its grid was measured
    assert origin(job("mi300x"), 4096, 4096, 4096).kind == "assumed"


# How the tables are made.


def test_isolated_rows_are_found_and_gaps_are_filled() -> None:
    fit = pytest.importorskip("silicon.products_fit")
    axes = [np.array([1.0, 2.0, 4.0, 8.0, 16.0])] * 3
    smooth = sum(np.log(values) for values in np.meshgrid(*axes, indexing="ij"))
    assert not fit.isolated(smooth, axes).any()
    wrong = smooth.copy()
    wrong[2, 2, 2] += np.log(4.0)
    assert np.argwhere(fit.isolated(wrong, axes)).tolist() == [[2, 2, 2]]
    step = smooth.copy()
    step[3:] += np.log(4.0)  # a step along one axis is no fault of single rows
    assert not fit.isolated(step, axes).any()
    gaps = smooth.copy()
    gaps[1, 2, 3] = gaps[4, 4, 4] = np.nan
    gaps[0, 0] = np.nan
    assert fit.completed(gaps, axes) == pytest.approx(smooth)


def test_the_isotonic_fit_is_monotone_and_keeps_what_is() -> None:
    fit = pytest.importorskip("silicon.products_fit")
    rising = np.arange(6.0)[:, None]
    assert fit.monotone(rising) == pytest.approx(rising)
    fitted = fit.monotone(np.array([[1.0], [3.0], [2.0], [2.0], [5.0], [4.0]]))[:, 0]
    assert fitted == pytest.approx([1.0, 7 / 3, 7 / 3, 7 / 3, 4.5, 4.5])


@needs_data
def test_the_shipped_files_are_what_the_script_makes() -> None:
    products = pytest.importorskip("silicon.products")
    rows, hosted = products.of_kernel("h100-sxm", "fp8_block/deepgemm")
    assert hosted > 30_000  # rows of vLLM contain the host's time
    sides = products.sides_of(rows)
    made = products.distil(rows, products.SHIPPED, sides, sides)
    shipped = grid("products", "h100-sxm/fp8_block/deepgemm")
    assert shipped is not None
    assert np.abs(made.log_s - shipped.log_s).max() <= 0.5 * STEP + 1e-9
    assert shipped.origin["rows"] == made.rows
    assert shipped.origin["dropped"] == made.dropped | {"host time": hosted}


MISSED = {("h200", "fp8_block/deepgemm", side): (12, 38) for side in ("m", "n")}
"""Bars that tables miss where sizes are left out, with the bar that they keep instead; see the page of results."""


def judged(device: str, table: str, step: int) -> None:
    judge = pytest.importorskip("silicon.judge_products")
    rows, _ = judge.products.of_kernel(device, table)
    for side, errors in judge.by_side(rows, judge.products.waves(device, table), step).items():
        median, p90 = MISSED.get((device, table, side), judge.BARS[table][side])
        assert (errors["median"] <= median, errors["p90"] <= p90) == (True, True), (device, table, side, errors)


@needs_data
@pytest.mark.parametrize(("device", "table"), [("h100-sxm", "bf16/linear"), ("h200", "fp8_block/deepgemm")])
def test_tables_without_a_size_predict_it(device: str, table: str) -> None:
    judged(device, table, 5)


@pytest.mark.long
@needs_data
@pytest.mark.parametrize("name", [name for name in TABLES if "aiter" not in name])
def test_every_table_without_a_size_predicts_it(name: str) -> None:
    judged(*name.split("/", 1), 1)


@pytest.mark.long
@needs_data
@pytest.mark.parametrize("name", [name for name in TABLES if "aiter" in name])
def test_amd_tables_without_an_m_predict_it(name: str) -> None:
    judge = pytest.importorskip("silicon.judge_products")
    device, table = name.split("/", 1)
    errors = judge.amd_left_out(device, table)["m"]
    assert (errors["median"] <= 5, errors["p90"] <= 25) == (True, True)


def test_a_plans_inputs_name_the_tables_that_price_it() -> None:
    def tables(hardware: str, model: str = "{preset: gpt2, layers: 2}", precision: str = "fp16") -> set[str]:
        text = f"model: {model}\nhardware: {hardware}\ndata: python-stdlib\n"
        sizes = f"training: {{sequence_length: 64, global_batch: 8, steps: 9, precision: {precision}}}\n"
        inputs = plan_of(text + sizes).inputs
        return {name.removeprefix("catalog/silicon/") for name in inputs if name.startswith("catalog/silicon/")}

    assert tables("{accelerator: h100-sxm}") == {"products", "attention", "experts", "collectives"}
    assert tables("{accelerator: t4, per_node: 2}") == {"collectives"}
    assert tables("{accelerator: cpu}", precision="fp32") == set()

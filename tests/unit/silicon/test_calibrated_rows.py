"""Rows that ``partool calibrate`` measured take the place of prices: exactly, monotone, and with bounds that hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from _bounds import LAYOUTS, above
from often import often
from random_problems import document, problem_of

from partool.catalog.hardware import resolve_hardware
from partool.catalog.profile import apply_profile
from partool.catalog.profile_file import MachineId, MeasuredFigures, Measurement, Profile, load_profile, save_profile
from partool.catalog.silicon.collectives import Operation
from partool.cost import collective
from partool.cost.case import Layouts
from partool.cost.silicon import calibrated
from partool.cost.silicon import collectives as collective_prices
from partool.cost.silicon.products import origin, priced_table
from partool.cost.time import attention
from partool.cost.time.gemm import equations_s, matmul_s
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.measured_rows import AttentionRow, CollectiveRow, MeasuredRows, ProductRow
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork

DATE = "2026-11-21"
SHAPES = [(4096, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (14336, 4096, 8192), (16384, 10240, 8192)]
SIZES = [2**20, 2**23, 2**26, 2**28, 2**30]
SEQUENCES = [(2048, 128), (8192, 32), (16384, 32)]


def machine(accelerator: str, **given: Any) -> Devices:
    precision = "fp16" if accelerator == "v100-32" else "bf16"
    devices = resolve_hardware(HardwareSpec(accelerator=accelerator, per_node=8, **given), precision).devices  # type: ignore[arg-type]
    assert devices is not None
    return devices


def job(devices: Devices, length: int = 1024, precision: str = "bf16", heads: int = 32) -> TrainingWork:
    model = ModelConfig(layers=2, hidden=4096, ffn_hidden=8192, heads=heads, kv_heads=heads, head_dim=128, vocab=256)
    return TrainingWork(model, devices, length, precision, global_batch=8)  # type: ignore[arg-type]


def both_passes_s(work: TrainingWork, micro_batch: float = 1.0) -> float:
    layouts = Layouts(micro_batch=micro_batch)
    return sum(
        float(np.ravel(attention.attention_s(work, layouts, backward=backward))[0]) for backward in (False, True)
    )


def calibrated_machine(devices: Devices, seed: int, most: float = 1.4) -> Devices:
    """Return the machine with rows of random ratios to its prices."""
    pick = Random(seed)

    def ratio() -> float:
        return pick.uniform(1.0 / most, most)

    work, everyone = job(devices), collective.RankGroup(devices.per_node, devices.per_node, devices.per_node)
    products = [ProductRow(m=m, n=n, k=k, seconds=ratio() * float(matmul_s(work, m, n, k))) for m, n, k in SHAPES]
    sequences = []
    for length, heads in SEQUENCES:
        seconds = ratio() * both_passes_s(job(devices, length), heads / 32)
        sequences.append(AttentionRow(length=length, heads=heads, width=128, seconds=seconds))
    collectives = []
    operations: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    for operation in operations:
        seconds = 0.0
        for size in SIZES:
            seconds = max(seconds, ratio() * float(collective.inside_s(work, operation, float(size), everyone)))
            row = CollectiveRow(operation=operation, ranks=devices.per_node, whole_bytes=size, seconds=seconds)
            collectives.append(row)
    rows = MeasuredRows(date=DATE, products=tuple(products), attention=tuple(sequences), collectives=tuple(collectives))
    return devices.model_copy(update={"measured_rows": rows})


@pytest.mark.parametrize("accelerator", ["a100-80", "l40s", "h800", "mi355x", "v100-32", "mi300x"])
@pytest.mark.parametrize("seed", range(2))
def test_a_price_at_a_row_is_the_row(accelerator: str, seed: int) -> None:
    devices = calibrated_machine(machine(accelerator), seed, most=1.1)
    rows, work = devices.measured_rows, job(devices)
    assert rows is not None
    table = priced_table(work, equations_s)
    assert table is not None
    for row in rows.products:
        clocks_s = table.clocks_flop_s * 2.0 * row.m * row.n * row.k
        assert float(matmul_s(work, row.m, row.n, row.k)) - clocks_s == pytest.approx(row.seconds, rel=1e-9)
    for one in rows.attention:
        of_length = job(devices, one.length)
        clocks = attention._clocks(of_length, of_length.stack.attention, latent=False)
        assert clocks * both_passes_s(of_length, one.heads / 32) == pytest.approx(one.seconds, rel=1e-9)
    everyone = collective.RankGroup(8, 8, 8)
    for each in rows.collectives:
        operation: Any = each.operation
        seconds = float(collective.inside_s(work, operation, float(each.whole_bytes), everyone))
        assert seconds == pytest.approx(each.seconds, rel=1e-9)


@pytest.mark.parametrize("accelerator", ["a100-80", "v100-32"])
@pytest.mark.parametrize("seed", range(3))
def test_products_grow_with_aligned_m_and_keep_their_form_beyond_rows(accelerator: str, seed: int) -> None:
    plain = machine(accelerator, sustained_share=1.0)
    work, before = job(calibrated_machine(plain, seed, most=3.0)), job(plain)
    m = np.arange(16.0, 70000.0, 16.0)
    for n, k in [(4096.0, 4096.0), (14336.0, 4096.0), (10240.0, 8192.0), (5120.0, 1024.0), (512.0, 65536.0)]:
        seconds = matmul_s(work, m, n, k)
        assert np.all(np.diff(seconds) >= -1e-12 * seconds[1:]), (n, k)
        assert np.all(seconds[1:] <= 2.5 * seconds[:-1]), "no jumps: m grows by a factor of two at most"
    small = [float(matmul_s(work, m, 256.0, 256.0) / matmul_s(before, m, 256.0, 256.0)) for m in (16.0, 1024.0, 2048.0)]
    assert small == pytest.approx([small[0]] * 3, rel=0.02), "held constant beyond the rows"


def test_rows_that_fall_meet_in_the_middle() -> None:
    log_s = np.array([0.0, 1.0, 2.0, 3.0])[:, None]
    rows = np.array([False, True, True, False])[:, None]
    assert calibrated.pinned(log_s, rows)[:, 0] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    falling = np.array([9.0, 2.0, 1.0, 0.5])[:, None]
    assert calibrated.pinned(falling, rows)[:, 0] == pytest.approx([1.5, 1.5, 1.5, 1.5])


@pytest.mark.parametrize("accelerator", ["h100-sxm", "l40s", "gh200-96", "v100-32", "mi250x", "cpu"])
@pytest.mark.parametrize("seed", range(2))
def test_collectives_grow_with_bytes_and_bounds_hold(accelerator: str, seed: int) -> None:
    devices = calibrated_machine(machine(accelerator), seed, most=4.0)
    work = job(devices)
    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        for members in (2, 5, 8):
            ranks = collective.RankGroup(members, members, members)
            sizes = np.array([0.0, *np.geomspace(256, 2.0**36, 600)])
            seconds = collective.inside_s(work, operation, sizes, ranks)  # type: ignore[arg-type]
            assert np.all(np.diff(seconds) >= -1e-15)
            for least in (0.0, 3e5, 3e7):
                line = np.linspace(max(least, 1.0), 40.0 * max(least, 1e5), 600)
                exact = collective.inside_s(work, operation, line, ranks)  # type: ignore[arg-type]
                bound = collective.inside_s(work, operation, line, ranks, least)  # type: ignore[arg-type]
                assert np.all(bound <= exact * (1.0 + 1e-12))
                assert np.all(np.diff(bound, 2) >= -1e-12 * np.max(bound))


@pytest.mark.parametrize("accelerator", ["a100-80", "h100-sxm", "b300", "v100-32", "cpu"])
@pytest.mark.parametrize("seed", range(2))
def test_attention_grows_with_length(accelerator: str, seed: int) -> None:
    devices = calibrated_machine(machine(accelerator), seed, most=3.0)
    seconds = [both_passes_s(job(devices, length, heads=8)) for length in (512, 1024, *range(2048, 20480, 512))]
    assert np.all(np.diff(seconds) >= 0.0)


def test_prices_say_which_rows_they_come_from() -> None:
    a100 = calibrated_machine(machine("a100-80"), 0)
    work = job(a100, 8192)
    assert origin(work, 4096, 4096, 4096) == ("measured", f"this machine, {DATE}")
    between, beyond = origin(work, 8192, 8192, 8192), origin(work, 1024, 8192, 8192)
    assert (between.kind, f"between products of this machine, {DATE}" in between.text) == ("interpolated", True)
    assert (beyond.kind, f"by the nearest products of this machine, {DATE}" in beyond.text) == ("scaled", True)
    at, off = attention.origin(work, Layouts(), backward=False), attention.origin(job(a100), Layouts(), backward=False)
    assert at == ("measured", f"this machine, {DATE}, both passes together")
    assert (off.kind, f"this machine, {DATE}" in off.text) == ("scaled", True)
    kinds = [collective_prices.origin(a100, "all_gather", ranks).kind for ranks in (8, 4)]
    assert kinds == ["measured", "scaled"]
    assert f"this machine, {DATE}" in collective_prices.origin(a100, "all_gather", 8).text
    assert DATE not in collective_prices.origin(a100, "all_to_all", 8).text, "calibrations measure no all-to-all"
    v100 = job(calibrated_machine(machine("v100-32"), 0), precision="fp16")
    kinds = [origin(v100, *sides, equation=equations_s).kind for sides in ((4096, 4096, 4096), (64, 64, 64))]
    assert kinds == ["scaled", "scaled"]
    assert origin(v100, 4096, 4096, 4096, equation=equations_s).text.startswith(f"this machine, {DATE}; ×")
    assert origin(v100, 4096, 4096, 4096).kind == "assumed"
    h100 = origin(job(calibrated_machine(machine("h100-sxm"), 0)), 16384, 10240, 8192)
    assert (h100.kind, "for clocks over a whole step" in h100.text) == ("scaled", True)


def measurement(kind: str, name: str, precision: str, seconds: float, sides: tuple[int, ...]) -> Measurement:
    return Measurement(
        kind=kind, name=name, precision=precision, work=1.0, work_unit="flop", sides=sides, seconds=seconds,
        mad_s=0.0, n=3,
    )  # fmt: skip


def profile(accelerator: str, measurements: list[Measurement], ranks: int = 8) -> Profile:
    figure = {"value": 1e14, "unit": "flop/s", "n": 3, "mad": 1.0}
    return Profile(
        partool_version="0", created=f"{DATE}T08:00:00+00:00", complete=True,
        machine=MachineId(accelerator=accelerator, ranks=ranks, backend="cuda"),
        figures=MeasuredFigures.model_validate({"achievable_flops": {"bf16": figure}}),
        measurements=tuple(measurements),
    )  # fmt: skip


ROWS = [
    measurement("gemm", "forward 4096x4096x4096", "bf16", 3e-4, (4096, 4096, 4096)),
    measurement("gemm", "input gradient 4096x4096x4096", "bf16", 5e-4, (4096, 4096, 4096)),
    measurement("gemm", "forward 8192x8192x8192", "bf16", 4e-3, (8192, 8192, 8192)),
    measurement("gemm", "forward 8192x8192x8192", "fp8", 2e-3, (8192, 8192, 8192)),
    measurement("attention", "4x32x2048x128", "bf16", 1e-3, (4, 32, 2048, 128)),
    measurement("attention", "1x32x8192x128", "bf16", 4e-3, (1, 32, 8192, 128)),
    measurement("collective", "all_gather 1048576", "fp32", 3e-5, (2**20,)),
    measurement("collective", "all_gather 8388608", "fp32", 1e-4, (2**23,)),
    measurement("collective", "all_reduce 8388608", "fp32", 1e-4, (2**23,)),
]


def applied(folder: Path, made: Profile, precision: str = "bf16", **spec: Any) -> Devices:
    save_profile(made, folder / "p.json")
    hardware = HardwareSpec(accelerator=made.machine.accelerator, per_node=8, profile="p.json", **spec)
    devices = resolve_hardware(hardware, precision).devices  # type: ignore[arg-type]
    assert devices is not None
    return apply_profile(hardware, devices, precision, base_dir=folder).devices


def test_a_calibration_brings_its_rows(tmp_path: Path) -> None:
    devices = applied(tmp_path, profile("a100-80", ROWS))
    rows = devices.measured_rows
    assert rows is not None
    assert rows.date == DATE
    assert [(row.m, row.seconds) for row in rows.products] == [(4096, pytest.approx(4e-4)), (8192, 4e-3)]
    assert [(row.length, row.heads, row.seconds) for row in rows.attention] == [(8192, 32, 4e-3), (2048, 128, 1e-3)]
    assert {(row.operation, row.ranks) for row in rows.collectives} == {("all_gather", 8)}, "one row only scales"
    assert Devices.model_validate_json(devices.model_dump_json()) == devices


def test_rows_in_16_bits_price_the_wide_products_of_fp8(tmp_path: Path) -> None:
    rows = applied(tmp_path, profile("h100-sxm", ROWS), "fp8").measured_rows
    assert rows is not None
    assert [(row.wide, row.m) for row in rows.products] == [(True, 4096), (True, 8192)]


def test_one_row_of_a_kind_scales_as_before(tmp_path: Path) -> None:
    single = [row for row in ROWS if row.name in ("forward 8192x8192x8192", "1x32x8192x128", "all_reduce 8388608")]
    devices = applied(tmp_path, profile("a100-80", single))
    assert devices == applied(tmp_path, profile("a100-80", []))
    assert devices.measured_rows is None


def test_older_calibrations_load_scale_and_keep_their_hash(tmp_path: Path) -> None:
    made = profile("a100-80", [row.model_copy(update={"sides": ()}) for row in ROWS])
    content = json.loads(made.model_dump_json())
    for one in content["measurements"]:
        del one["sides"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = load_profile(tmp_path / "old.json")
    assert old == made
    assert applied(tmp_path, old).measured_rows is None
    assert old.figures_hash == profile("a100-80", []).figures_hash
    slower = ROWS[0].model_copy(update={"seconds": 9e-4})
    hashes = {profile("a100-80", rows).figures_hash for rows in ([], ROWS, [slower, *ROWS[1:]])}
    assert len(hashes) == 3, "predictions with other rows are not comparable"


@pytest.mark.parametrize(
    ("spec", "gone"),
    [
        ({"achievable_tflops": 200.0}, {"products"}),
        ({"memory_gb_per_s": 1500.0}, {"products"}),
        ({"peak_tflops": 300.0}, {"products", "attention"}),
        ({"link_gb_per_s": 200.0}, {"collectives"}),
        ({"link_latency_us": 5.0}, {"collectives"}),
        ({"memory_gib": 60.0}, set()),
    ],
)
def test_figures_of_the_spec_leave_out_rows_that_would_contradict_them(
    tmp_path: Path, spec: dict[str, float], gone: set[str]
) -> None:
    rows = applied(tmp_path, profile("a100-80", ROWS), **spec).measured_rows
    assert rows is not None
    assert {name for name in ("products", "attention", "collectives") if not getattr(rows, name)} == gone


NAMES = ("h100-sxm", "a100-80", "l40s", "v100-32", "gb200")


@pytest.mark.parametrize("seed", often(range(40), kept=(3,)))
def test_no_bound_is_above_the_exact_time_with_rows(seed: int) -> None:
    pick = Random(seed)
    given = document(pick.choice)
    given["hardware"] = {"accelerator": NAMES[seed % len(NAMES)], "nodes": pick.choice([1, 2]), "per_node": 8}
    given["training"] |= {"precision": "fp16", "global_batch": 64}
    problem = problem_of(given)
    assert above(replace(problem, devices=calibrated_machine(problem.devices, seed, most=2.0)), seed, LAYOUTS) == []

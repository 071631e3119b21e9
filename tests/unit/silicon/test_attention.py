"""Measured attention: tables against measurements, and what prices made of them must hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from often import often
from silicon import attention as distil
from silicon import judge_attention as judge
from silicon.attention_fit import LENGTHS, Floats, Rows, split
from silicon.writing import DATA, SYSTEMS

from partool.catalog.hardware import resolve_hardware
from partool.catalog.silicon.grid import FAMILIES, entries, grid
from partool.cost.case import SEQUENCE_METHODS, Layouts
from partool.cost.kinds import Kind
from partool.cost.silicon import attention as silicon
from partool.cost.time.attention import attention_s, kernel, origin, pairs
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.model import Mla, ModelConfig
from partool.work.base import Workload
from partool.work.stacks import PARTOOL

DEVICES = sorted(SYSTEMS.values())
MODEL = ModelConfig(layers=2, hidden=4096, ffn_hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=1000)
MEDIAN, P90 = 0.05, 0.15
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the folder of measurements is not here")


def devices(name: str = "h100-sxm", precision: Any = "bf16", **fields: Any) -> Devices:
    spec = HardwareSpec.model_validate({"accelerator": name, "nodes": 1, "per_node": 8} | fields)
    return resolve_hardware(spec, precision).devices


def job(machine: Devices, length: int = 4096, *, attention: Any = "flash3", **model: Any) -> Workload:
    precision = model.pop("precision", "bf16")
    return Workload(MODEL.model_copy(update=model), machine, length, precision, replace(PARTOOL, attention=attention))


def seconds(one: Workload, window: int | None = None, *, backward: bool = False, **columns: Any) -> Any:
    return attention_s(one, Layouts(**columns), Kind(window, False), backward=backward)


# Tables against measurements.


def test_the_tables_meet_a_sample_of_measurements() -> None:
    errors: dict[str, list[Floats]] = {}
    for rows in distil.read_sample():
        errors.setdefault(f"{rows.device}/{rows.kernel}", []).append(judge.errors(rows, judge.shipped(rows)))
    assert sorted({name.split("/")[0] for name in errors}) == DEVICES
    for name, parts in errors.items():
        found = judge.quantiles(np.concatenate(parts))
        assert (found["median"] <= MEDIAN, found["p90"] <= P90) == (True, True), (name, found)


@needs_data
@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_the_tables_meet_all_measurements(device: str) -> None:
    for kind, rows_of_kernel in (by_kernel(device) | by_kernel(device, windows=True)).items():
        error = np.concatenate([judge.errors(rows, judge.shipped(rows)) for rows in rows_of_kernel])
        found = judge.quantiles(error)
        assert (found["median"] <= MEDIAN, found["p90"] <= P90) == (True, True), (kind, found)


@needs_data
@pytest.mark.parametrize(("device", "axis"), often(product(DEVICES, sorted(judge.LEFT_OUT)), [("a100-80", "length")]))
def test_tables_made_without_a_size_meet_it(device: str, axis: str) -> None:
    for kind, rows_of_kernel in by_kernel(device).items():
        found = judge.quantiles(np.concatenate([judge.left_out(rows, axis) for rows in rows_of_kernel]))
        assert (found["median"] <= MEDIAN, found["p90"] <= P90) == (True, True), (kind, found)


def by_kernel(device: str, *, windows: bool = False) -> dict[str, list[Rows]]:
    """Return a device's measurements of full attention, or of ``windows``, by kernel."""
    parts: dict[str, list[Rows]] = {}
    for rows in distil.read(device):
        part = rows.taken((rows.window > 0) == windows)
        if len(part.seconds):
            parts.setdefault(f"{rows.kernel}{' with windows' if windows else ''}", []).append(part)
    return parts


def test_the_cache_costs_what_its_key_heads_cost() -> None:
    """Measured seconds of a kernel and a cache whose cost is not proportional to bytes: both are told apart."""
    at = np.array([
        (batch, length, heads, keys, window)
        for batch, length, heads, keys in product((1, 2, 4, 8), LENGTHS[4:], (8, 16, 32), (1, 2, 4, 8))
        for window in (0, 128)
    ], float).T  # fmt: skip
    per_token = {1.0: 1e-9, 2.0: 2e-9, 4.0: 3e-9, 8.0: 12e-9}
    batch, length, heads, keys, window = at
    kernel_s = 1e-5 + batch * heads * length * np.where(window > 0, 128.0, length) * 1e-13
    cache_s = batch * length * np.array([per_token[each] for each in keys])
    rows = Rows("h200", "kernel", "", "64", batch, length, heads, keys, window, kernel_s + cache_s)
    cost = split(rows).cache[:4]
    assert np.diff(cost) == pytest.approx(np.diff([*per_token.values()]), rel=0.05)


def test_every_table_says_where_it_is_from() -> None:
    assert "attention" in FAMILIES
    for name, entry in entries("attention").items():
        assert name.startswith(f"{entry['device']}/bf16/{entry['kernel']}/")
        assert entry["licence"] == "Apache-2.0"
        assert min(len(entry["source"]), len(entry["date"]), entry["rows"]) > 0


# Prices.


@pytest.mark.parametrize(
    ("name", "table"), [("h100-sxm", "vllm_flash_attn_fa3/128/all"), ("a100-80", "vllm_flash_attn/128/all")]
)
def test_a_price_at_a_point_of_a_table_is_the_measurement_at_the_clocks_of_a_step(name: str, table: str) -> None:
    measured = grid("attention", f"{name}/bf16/{table}")
    assert measured is not None
    for length, batch in ((4096, 1), (8192, 2), (16384, 4)):
        expected = float(measured.seconds(length, 32 * batch)) / devices(name).sustained_share
        assert seconds(job(devices(name), length), micro_batch=batch) == pytest.approx(expected)


def test_clocks_of_a_spec_scale_prices() -> None:
    base, slower = (seconds(job(devices(sustained_share=share))) for share in (1.0, 0.5))
    assert slower == pytest.approx(2 * base)


@pytest.mark.parametrize(
    ("name", "width"),
    often(product(DEVICES, [32, 64, 80, 128, 192, 256]), [("a100-80", 80), ("h100-sxm", 256), ("gb200", 64)]),
)
def test_seconds_rise_with_length_heads_and_window(name: str, width: int) -> None:
    machine = devices(name)
    lengths = np.unique(np.geomspace(64, 65536, 40).astype(int)).tolist()
    for window in (None, 128, 1000, 4096):
        rising = [float(seconds(job(machine, length, head_dim=width), window)) for length in lengths]
        assert min(rising) > 0
        assert np.all(np.diff(rising) >= -1e-9 * np.array(rising[1:])), window
    batches = np.arange(1, 1200, 7)
    assert np.all(np.diff(seconds(job(machine, 2048, head_dim=width), micro_batch=batches)) >= 0)
    windows = [float(seconds(job(machine, 8192, head_dim=width), window)) for window in range(16, 9000, 397)]
    assert np.all(np.diff([*windows, float(seconds(job(machine, 8192, head_dim=width)))]) >= -1e-12)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("window", [None, 512])
def test_prices_are_continuous_at_the_edges_of_the_tables(name: str, window: int | None) -> None:
    machine = devices(name)
    for edge in (128, 16384):
        near = [float(seconds(job(machine, length), window)) for length in (edge - 1, edge, edge + 1)]
        assert near == pytest.approx([near[1]] * 3, rel=2.5 / edge)
    for edge in (1.0, 16384.0):  # heads of all sequences
        near = [
            float(seconds(job(machine, 1024), window, micro_batch=edge * part / 32)) for part in (0.999, 1.0, 1.001)
        ]
        assert near == pytest.approx([near[1]] * 3, rel=2e-3)


def test_beyond_the_tables_the_rate_stays() -> None:
    for name in DEVICES:
        at_edge, far = (float(seconds(job(devices(name), length))) for length in (16384, 131072))
        assert far == pytest.approx(64 * at_edge, rel=0.02)


def test_latent_attention_has_tables_of_its_own() -> None:
    latent = Mla(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    one = job(devices(), mla=latent, kv_heads=32)
    table = grid("attention", "h100-sxm/bf16/default/192+128/all")
    assert table is not None
    assert seconds(one) == pytest.approx(float(table.seconds(4096, 32)) / devices().sustained_share)


def test_rates_of_a_spec_scale_the_tables() -> None:
    catalog = silicon.catalog_flops("h100-sxm") / 1e12
    base, half = (seconds(job(devices(attention_tflops=catalog * share), 8192)) for share in (1.0, 0.5))
    assert base == pytest.approx(seconds(job(devices(), 8192)))
    assert half == pytest.approx(2 * base, rel=0.02)
    assert seconds(job(devices(power_w=350), 8192)) == pytest.approx(2 ** (2 / 3) * base, rel=0.02)


def test_memory_changes_no_price_and_only_the_name_picks_a_table() -> None:
    base = seconds(job(devices()))
    assert seconds(job(devices(memory_gib=20))) == base
    plain = devices().model_copy(update={"measured_as": ""})
    assert seconds(job(plain)) != pytest.approx(base, rel=0.03)
    assert seconds(job(plain.model_copy(update={"measured_as": "h100-sxm", "accelerator": "other"}))) == base
    card = seconds(job(devices("h100-pcie"), 8192))
    rate = devices("h100-pcie").attention_flops
    assert rate is not None
    ratio = silicon.catalog_flops("h100-sxm") / rate
    assert card == pytest.approx(ratio * seconds(job(devices(sustained_share=1.0), 8192)), rel=0.02)


def test_what_was_not_measured_keeps_the_equation() -> None:
    plain = devices().model_copy(update={"measured_as": ""})
    for changes in ({"precision": "fp32"}, {"attention": "flash1"}, {"attention": "unfused"}):
        if changes.get("attention") != "unfused":  # made of products, which have tables of their own
            assert seconds(job(devices(), **changes)) == seconds(job(plain, **changes))
        assert origin(job(devices(), **changes), Layouts(), backward=False).kind == "assumed"
    assert origin(job(plain), Layouts(), backward=False).kind == "assumed"


def test_an_older_kernel_is_slower_by_the_equations_ratio() -> None:
    newest, older = (seconds(job(devices(), 8192, attention=name)) for name in ("flash3", "flash2"))
    assert older / newest == pytest.approx(silicon.catalog_flops("h100-sxm") / 350e12, rel=0.02)
    newest, older = (seconds(job(devices("a100-80"), attention=name)) for name in ("flash3", "flash2"))
    assert older == newest


def test_a_backward_pass_is_scaled() -> None:
    forward, backward = (seconds(job(devices(), 8192), backward=which) for which in (False, True))
    assert backward / forward == pytest.approx(2.5 / silicon.BACKWARD_RATE, rel=0.02)
    said = origin(job(devices(), 8192), Layouts(), backward=True)
    assert (said.kind, "0.85 of the rate" in said.text) == ("scaled", True)


def test_origins_say_what_is_between_and_beyond_measurements() -> None:
    def kind(length: int, name: str = "l40s", **model: Any) -> str:
        return origin(job(devices(name), length, **model), Layouts(), backward=False).kind

    assert [kind(4096), kind(5000), kind(32768), kind(4096, head_dim=96), kind(4096, "h100-sxm")] == [
        "measured", "interpolated", "scaled", "scaled", "scaled",
    ]  # fmt: skip


# Sequence parallelism.


def test_a_block_of_a_ring_costs_what_a_sequence_of_its_length_costs() -> None:
    ring = SEQUENCE_METHODS.index("ring")
    one = float(seconds(job(devices(), 2048)))
    assert seconds(job(devices(), 16384), cp=8, sequence_method=ring, sequence_order=1) == pytest.approx(8 * one)
    mean = float(seconds(job(devices(), 16384))) / 8
    assert 8 * one > 1.2 * mean


def test_every_method_attends_in_kernels_with_all_of_its_pairs() -> None:
    methods = np.array([index for index, name in enumerate(SEQUENCE_METHODS) if name != "dsp"])
    layouts = Layouts(cp=4, sequence_method=methods, sequence_order=1, sequence_inner=2, sequence_teams=2)
    shape = kernel(job(devices(), 16384), layouts)
    done = np.asarray(shape.heads) * np.asarray(shape.length) ** 2 / 2
    every = pairs(job(devices(), 16384), layouts, Kind(None, False))
    kernels = np.asarray(every) / done
    assert kernels == pytest.approx(np.rint(kernels))
    assert np.all(kernels >= 1)


def test_columns_and_single_layouts_have_the_same_prices() -> None:
    tensor, batch = np.array([1, 2, 4, 8, 1]), np.array([1, 2, 3, 4, 1])
    for window in (None, 512):
        together = seconds(job(devices(), head_dim=96), window, tp=tensor, micro_batch=batch)
        alone = [
            seconds(job(devices(), head_dim=96), window, tp=t, micro_batch=b)
            for t, b in zip(tensor, batch, strict=True)
        ]
        assert together == pytest.approx(alone)

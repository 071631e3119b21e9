"""Figures of a CPU that depend on shapes: how they are fitted, how plans read them, and how predictions use them."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from _bounds import LAYOUTS, above
from random_problems import document, problem_of

from partool import __version__
from partool.catalog.hardware import resolve_hardware
from partool.catalog.machine import available_cores, processor
from partool.catalog.profile import apply_profile
from partool.catalog.profile_file import Profile, load_profile
from partool.cost.case import Layouts
from partool.cost.kinds import kinds
from partool.cost.time.attention import attention_s
from partool.cost.time.gemm import matmul_s
from partool.cost.time.layer import layer
from partool.report.calibration import calibration_text
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.model import ModelConfig
from partool.work.stacks import own_stack
from partool.work.training import TrainingWork
from partool_runtime.calibrate.fit import figures, product_line
from partool_runtime.calibrate.items import _fresh, _gemm

SHAPES = [(2048, 192, 192), (1024, 512, 192), (192, 2048, 192), (512, 512, 512), (1024, 1024, 1024), (1024, 2816, 1024)]
MODEL = ModelConfig(layers=1, hidden=64, ffn_hidden=128, heads=4, kv_heads=2, head_dim=16, vocab=256)
CPU = Devices(
    accelerator="cpu", backend="cpu", nodes=1, per_node=1, memory_bytes=2**34, peak_flops=None, achievable_flops=1e11,
    memory_bytes_per_s=30e9, link_bytes_per_s=1e9, fabric_bytes_per_s=1e9,
)  # fmt: skip


def product_times(flops_per_s: float, element_s: float, shapes: list[tuple[int, int, int]] = SHAPES) -> list[Any]:
    found = []
    for m, n, k in shapes:
        flops, elements = 2.0 * m * n * k, float(m * k + k * n + m * n)
        found.append((flops, elements, flops / flops_per_s + elements * element_s))
    return found


def test_the_times_of_products_tell_apart_flops_and_elements() -> None:
    points = product_times(100e9, 0.3e-9)
    found = product_line(points)
    assert found is not None
    assert found[:2] == pytest.approx((100e9, 0.3e-9))
    assert found[2] < 1e-9


@pytest.mark.parametrize("slow", range(len(SHAPES)))
def test_one_disturbed_product_does_not_move_the_line(slow: int) -> None:
    times = [(*each[:2], each[2] * (1.5 if at == slow else 1.0)) for at, each in enumerate(product_times(1e11, 3e-10))]
    found = product_line(times)
    assert found is not None
    assert found[:2] == pytest.approx((1e11, 3e-10))


@pytest.mark.parametrize(
    "points",
    [
        product_times(100e9, 0.3e-9)[:5],
        product_times(100e9, 0.3e-9, [(512, 512, 512), (1024, 1024, 512)] * 4),
        product_times(100e9, -0.3e-9),
        product_times(1e15, 0.3e-9),
    ],
    ids=["few shapes", "similar shapes", "faster with more elements", "no cost of FLOPs"],
)
def test_products_without_two_costs_have_no_line(points: list[Any]) -> None:
    assert product_line(points) is None


def measured(kind: str, work: float, seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "kind": kind, "name": "", "precision": "fp32", "work": work, "work_unit": "flop", "seconds": seconds,
        "mad_s": 0.0, "n": 7, **changes,
    }  # fmt: skip


def test_a_cpu_has_a_line_for_each_precision_that_fits_one() -> None:
    products = [
        measured("gemm", flops, seconds, elements=elements, precision=precision)
        for precision, element_s in (("fp32", 0.3e-9), ("bf16", -0.3e-9))
        for flops, elements, seconds in product_times(100e9, element_s)
    ]
    found = figures(products, "cpu", 1)
    assert found["achievable_flops"].keys() == {"bf16", "fp32"}
    assert found["products"].keys() == {"fp32"}
    assert found["products"]["fp32"]["flops_per_s"]["value"] == pytest.approx(100e9)
    assert found["products"]["fp32"]["element_s"]["value"] == pytest.approx(0.3e-9)
    assert "products" not in figures(products, "cuda", 1)
    assert "products" not in figures([one | {"elements": 0.0} for one in products], "cpu", 1)


def test_products_go_to_memory_that_was_used_before() -> None:
    work = _gemm(4, 5, 3, torch.device("cpu"), "fp32")
    places = [work().data_ptr() for _ in range(16)]  # type: ignore[attr-defined]
    assert places[:8] == places[8:]
    assert len(set(places)) == 8


def test_first_writes_go_to_memory_that_is_mapped_anew() -> None:
    """A block of freed memory, which a tensor in use keeps from being returned, is large enough for what is written."""
    freed = [torch.ones(2**14) for _ in range(256)]
    last = torch.ones(2**10)
    del freed
    work = _fresh(2**20)
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(64):
        work()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before >= 64
    assert last.numel()


def figure(value: float, unit: str = "flop/s") -> dict[str, Any]:
    return {"value": value, "unit": unit, "n": 5, "mad": 0.01 * value}


BEFORE = {
    "profile_version": 1, "partool_version": __version__, "created": "2026-11-21T08:00:00+00:00", "complete": True,
    "machine": {"accelerator": "cpu", "processor": processor(), "cores": available_cores(), "ranks": 2},
    "figures": {
        "achievable_flops": {"fp32": figure(80e9)}, "attention_flops": {"fp32": figure(30e9)},
        "stream_bytes_per_s": figure(9e9, "byte/s"), "operator_s": figure(3e-6, "s"),
    },
    "measurements": [measured("gemm", 1e9, 0.1)],
}  # fmt: skip
"""A calibration from before there were figures by shape and of new memory."""
PRODUCTS = {"fp32": {"flops_per_s": figure(100e9), "element_s": figure(0.3e-9, "s/element")}}


def devices_with(folder: Path, more: dict[str, Any], **spec: Any) -> Devices:
    """Return the devices of a calibration with more figures than ``BEFORE``."""
    path = folder / "calibration.json"
    path.write_text(json.dumps({**BEFORE, "figures": {**BEFORE["figures"], **more}}))  # type: ignore[dict-item]
    hardware = HardwareSpec(**{"accelerator": "cpu", "per_node": 2, "profile": "calibration.json", **spec})
    devices = resolve_hardware(hardware, "fp32").devices
    assert devices is not None
    found = apply_profile(hardware, devices, "fp32", base_dir=folder)
    assert found.findings == ()
    return found.devices


def job(devices: Devices) -> TrainingWork:
    return TrainingWork(MODEL, devices, 128, "fp32", own_stack("cpu", "none"), global_batch=8)


def core_s(rate: float, length: int = 128) -> float:
    """Return the seconds of one layer's forward attention at a rate of wide heads."""
    return 2 * length * length / 2 * 4 * 32 / (0.7 * rate) + 5e-6


def test_an_old_calibration_gives_the_old_price(tmp_path: Path) -> None:
    devices = devices_with(tmp_path, {})
    assert (devices.product_element_s, devices.fresh_bytes_per_s) == (None, None)
    assert not {"product_element_s", "fresh_bytes_per_s", "attention_by_length"} & devices.model_dump().keys()
    assert attention_s(job(devices), Layouts(), backward=False) == pytest.approx(core_s(30e9))
    assert matmul_s(job(devices), 2048, 192, 192) == pytest.approx(2 * 2048 * 192 * 192 / 80e9)


def test_an_old_calibration_keeps_its_hash() -> None:
    machine = {"accelerator": "cpu"}
    old = {"achievable_flops": {"fp32": figure(80e9)}, "operator_s": figure(3e-6, "s")}
    profile = Profile.model_validate({**BEFORE, "machine": machine, "figures": old})
    assert profile.figures_hash == "0f1d20e0fa330df7bf74c623283f677b862d93cec855bb2d5a81711ea04f0675"
    more = Profile.model_validate({**BEFORE, "machine": machine, "figures": {**old, "products": PRODUCTS}})
    assert more.figures_hash != profile.figures_hash


def test_products_of_two_widths_follow_both_figures(tmp_path: Path) -> None:
    devices = devices_with(tmp_path, {"products": PRODUCTS})
    assert (devices.achievable_flops, devices.product_element_s) == (100e9, 0.3e-9)
    for width in (192, 1024):
        elements = 2 * 2048 * width + width * width
        expected = 2 * 2048 * width * width / 100e9 + 0.3e-9 * elements
        assert matmul_s(job(devices), 2048, width, width) == pytest.approx(expected)
        assert matmul_s(job(devices), 2048, width, width, batch=3) == pytest.approx(3 * expected)
    assert Devices.model_validate_json(devices.model_dump_json()) == devices


def test_ranks_share_the_cores_that_move_elements(tmp_path: Path) -> None:
    devices = devices_with(tmp_path, {"products": PRODUCTS}, per_node=4)
    assert (devices.achievable_flops, devices.product_element_s) == (50e9, 0.6e-9)


def test_a_rate_in_the_spec_replaces_both_figures(tmp_path: Path) -> None:
    devices = devices_with(tmp_path, {"products": PRODUCTS}, achievable_tflops=0.07)
    assert (devices.achievable_flops, devices.product_element_s) == (70e9, None)


def test_accelerators_have_no_cost_of_elements(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text(
        json.dumps({**BEFORE, "machine": {"accelerator": "h100-sxm"}, "figures": {"products": PRODUCTS}})
    )
    hardware = HardwareSpec(accelerator="h100-sxm", profile="calibration.json")
    devices = resolve_hardware(hardware, "fp32").devices
    assert devices is not None
    assert apply_profile(hardware, devices, "fp32", base_dir=tmp_path).devices == devices


@pytest.mark.parametrize(("kv_heads", "gated", "tp"), [(2, True, 1), (4, False, 1), (2, True, 2)])
def test_products_of_one_input_read_it_one_by_one(kv_heads: int, gated: bool, tp: int) -> None:
    changes = {"kv_heads": kv_heads, "activation": "swiglu" if gated else "gelu"}
    model = MODEL.model_copy(update=changes)
    one = TrainingWork(
        model, CPU.model_copy(update={"product_element_s": 1e-9}), 128, "fp32", own_stack("cpu", "none"), global_batch=8
    )
    other = TrainingWork(model, CPU, 128, "fp32", one.stack, global_batch=8)
    found, without = (layer(each, Layouts(micro_batch=2, tp=tp), kinds(model)[0]) for each in (one, other))
    rows, hidden, ffn, query, key = 256, 64, 128 / tp, 64 / tp, 16 * kv_heads / tp
    apart = [(query, hidden), (key, hidden), (key, hidden)] if tp == 1 else [(query + 2 * key, hidden)]
    apart += [(ffn, hidden)] * (1 + gated) if tp == 1 else [((1 + gated) * ffn, hidden)]
    elements = sum(rows * n + rows * k + n * k for n, k in [*apart, (hidden, query), (hidden, ffn)])
    assert found.forward.matmul_s - without.forward.matmul_s == pytest.approx(1e-9 * elements)
    assert found.backward.matmul_s - without.backward.matmul_s == pytest.approx(2e-9 * elements)


@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_above_the_exact_time_of_a_calibrated_cpu(seed: int) -> None:
    made = document(Random(seed).choice) | {"hardware": {"accelerator": "cpu", "per_node": 4, "memory_gib": 256}}
    made["training"]["global_batch"] = 12
    problem = problem_of(made)
    measured = {"product_element_s": 1e-9, "fresh_bytes_per_s": 2e9, "attention_by_length": ((256, 3e10), (1024, 6e10))}
    problem = replace(problem, devices=problem.devices.model_copy(update=measured))
    assert above(problem, seed, LAYOUTS) == []


def test_attention_has_a_rate_for_each_length_of_a_cpu() -> None:
    measured_at = [
        measured("attention", 6e9, seconds, length=length) for length, seconds in ((256, 2.0), (256, 1.0), (1024, 0.5))
    ]
    found = figures(measured_at, "cpu", 1)["attention_by_length"]["fp32"]
    assert {length: one["value"] for length, one in found.items()} == {256: 4.5e9, 1024: 12e9}
    assert "attention_by_length" not in figures(measured_at, "cuda", 1)
    assert "attention_by_length" not in figures(measured_at[:2], "cpu", 1)


def test_attention_is_priced_between_measured_lengths(tmp_path: Path) -> None:
    devices = devices_with(
        tmp_path, {"attention_by_length": {"fp32": {"1024": figure(60e9), "256": figure(30e9)}}}, per_node=4
    )
    assert devices.attention_by_length == ((256, 15e9), (1024, 30e9))
    assert Devices.model_validate_json(devices.model_dump_json()) == devices
    for length, rate in ((128, 15e9), (256, 15e9), (512, 22.5e9), (1024, 30e9), (4096, 30e9)):
        one = replace(job(devices), sequence_length=length)
        assert attention_s(one, Layouts(), backward=False) == pytest.approx(core_s(rate, length))
        assert attention_s(one, Layouts(), backward=True) == pytest.approx(2.5 * core_s(rate, length), rel=0.1)


def test_the_report_names_both_figures(tmp_path: Path) -> None:
    devices_with(tmp_path, {"products": PRODUCTS})
    text = calibration_text(load_profile(tmp_path / "calibration.json"))
    assert "100 GFLOP/s" in text
    assert "300 ps/element" in text

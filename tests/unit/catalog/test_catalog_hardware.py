"""Machine figures from the ``hardware`` section: the catalog's, the spec's own, and refused sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from partool.catalog import machine
from partool.catalog.hardware import resolve_hardware
from partool.catalog.lookup import table
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.training import Precision

NAMES = list(table("accelerators"))
OWN: dict[str, tuple[str, float]] = {
    "memory_gib": ("memory_bytes", 2**30),
    "peak_tflops": ("peak_flops", 1e12),
    "achievable_tflops": ("achievable_flops", 1e12),
    "sustained_share": ("sustained_share", 1.0),
    "wide_tflops": ("wide_flops", 1e12),
    "attention_tflops": ("attention_flops", 1e12),
    "memory_gb_per_s": ("memory_bytes_per_s", 1e9),
    "link_gb_per_s": ("link_bytes_per_s", 1e9),
    "pair_gb_per_s": ("pair_bytes_per_s", 1e9),
    "link_latency_us": ("link_latency_s", 1e-6),
    "fabric_gb_per_s": ("fabric_bytes_per_s", 1e9),
    "fabric_latency_us": ("fabric_latency_s", 1e-6),
    "host_link_gb_per_s": ("host_link_bytes_per_s", 1e9),
    "host_memory_gib": ("host_memory_bytes", 2**30),
    "host_memory_gb_per_s": ("host_memory_bytes_per_s", 1e9),
    "nvme_gb_per_s": ("disk_bytes_per_s", 1e9),
    "storage_gb_per_s": ("storage_bytes_per_s", 1e9),
    "operator_us": ("operator_s", 1e-6),
}
PLAIN = ("architecture", "topology", "domain", "units", "host_cores", "backend", "nodes", "per_node")
NOT_FIGURES = {"slice", "accelerator", "fabric", "profile", "power_w", "price_per_device_hour"}


def resolved(precision: Precision = "bf16", **fields: Any) -> Devices:
    devices = resolve_hardware(HardwareSpec(**fields), precision).devices
    assert devices is not None
    return devices


def described(devices: Devices) -> dict[str, Any]:
    """Return a machine's figures as fields of a spec."""
    own = {field: getattr(devices, name) / unit for field, (name, unit) in OWN.items() if getattr(devices, name)}
    return own | {field: getattr(devices, field) for field in PLAIN if getattr(devices, field)}


def test_every_field_of_the_spec_is_tried_here() -> None:
    assert set(HardwareSpec.model_fields) == {*OWN, *PLAIN, *NOT_FIGURES}


def test_a_power_limit_lowers_throughput_and_not_the_peak() -> None:
    full, limited = resolved("fp8", accelerator="h100-sxm"), resolved("fp8", accelerator="h100-sxm", power_w=500)
    share = (500 / 700) ** (2 / 3)
    for name in ("achievable_flops", "wide_flops", "attention_flops"):
        assert getattr(limited, name) == pytest.approx(share * getattr(full, name))
    assert (limited.peak_flops, limited.memory_bytes_per_s) == (full.peak_flops, full.memory_bytes_per_s)
    own = {"memory_gib": 48, "peak_tflops": 100, "memory_gb_per_s": 900}
    for fields in ({"accelerator": "h100-sxm", "power_w": 900}, {"accelerator": "cpu", "power_w": 90},
                   {"accelerator": "mine", "power_w": 90, **own}):  # fmt: skip
        found = resolve_hardware(HardwareSpec(**fields), "bf16")
        assert found.devices is None
        assert [(one.code, one.path) for one in found.diagnostics] == [("PT262", ("hardware", "power_w"))]
    unknown = resolve_hardware(HardwareSpec(accelerator="h100", power_w=500), "bf16")
    assert [one.code for one in unknown.diagnostics] == ["PT260"]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_figures_under_another_name_are_the_same_machine(name: str, precision: Precision) -> None:
    if precision not in table("accelerators")[name]["peak_tflops"]:
        precision = "fp16"
    known = resolved(precision, accelerator=name, nodes=3)
    own = resolved(precision, accelerator="our-own", **described(known))
    ours, catalog = own.model_dump(), known.model_dump()
    assert ours.pop("accelerator") == "our-own"
    catalog.pop("accelerator")
    catalog.pop("fabric")  # also a name; the fabric's figures are compared below
    catalog.pop("measured_as", None)  # follows the name
    for figure, value in catalog.items():
        # GiB are floats: a byte may be lost on the way.
        same = pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, int | float) else value
        assert ours[figure] == same, figure


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.sampled_from(sorted({*OWN, "domain", "units", "host_cores"} - {"peak_tflops"})))
def test_one_figure_of_the_spec_moves_only_that(name: str, field: str) -> None:
    fp8 = "fp8" in table("accelerators")[name]["peak_tflops"]
    precision: Precision = "fp8" if fp8 else "fp16"
    known = resolved(precision, accelerator=name)
    figure, unit = OWN.get(field, (field, 1.0))
    before = getattr(known, figure)
    if field == "wide_tflops" and not fp8:
        return
    value: Any = 0.9 * before / unit if before else 8.0
    changed = resolved(precision, accelerator=name, **{field: round(value) if field not in OWN else value})
    moved = {key for key, old in known.model_dump().items() if getattr(changed, key) != old}
    # Where each pair of devices has the whole link, a slower link also slows the pair.
    slower = {"pair_bytes_per_s"} if field == "link_gb_per_s" and known.pair_bytes_per_s == before else set()
    assert moved == {figure} | slower


def test_a_peak_moves_what_follows_from_it() -> None:
    known, half = resolved(accelerator="h200"), resolved(accelerator="h200", peak_tflops=494.5)
    assert known.attention_flops is not None
    assert half.achievable_flops == pytest.approx(known.achievable_flops / 2)
    assert half.attention_flops == pytest.approx(known.attention_flops / 2)
    kept = resolved(accelerator="h200", peak_tflops=494.5, achievable_tflops=400.0)
    assert kept.achievable_flops == 400e12


def test_meshes_racks_and_superchips() -> None:
    mi300x = resolved(accelerator="mi300x")
    assert (mi300x.topology, mi300x.pair_bytes_per_s, mi300x.link_bytes_per_s) == ("mesh", 64e9, 448e9)
    assert mi300x.backend == "rocm"
    slow = resolved(accelerator="mi300x", link_gb_per_s=32.0)
    assert slow.pair_bytes_per_s == 32e9
    for name in ("gb200", "gb300"):
        rack = resolved(accelerator=name, nodes=18)
        assert (rack.domain, rack.per_node) == (72, 4)
    assert resolved(accelerator="gb200", nodes=18, per_node=2).domain == 36
    assert resolved(accelerator="h100-sxm").domain == 0
    alone, four = resolved(accelerator="gh200-96", per_node=1), resolved(accelerator="gh200-96", per_node=4)
    assert (alone.host_cores, four.host_cores) == (72, 288)
    assert four.host_memory_bytes == 4 * 480 * 2**30
    assert four.host_memory_bytes_per_s == pytest.approx(4 * alone.host_memory_bytes_per_s)
    assert four.host_link_bytes_per_s == 450e9
    assert resolved(accelerator="gb200").host_cores == 2 * 72
    part = resolve_hardware(HardwareSpec(accelerator="gh200-96", nodes=3), "bf16", 1).devices
    assert part == alone
    assert resolved(accelerator="h100-sxm", per_node=2).host_cores == resolved(accelerator="h100-sxm").host_cores


@pytest.mark.parametrize(
    ("accelerator", "fields", "most", "gib"),
    [
        ("gh200-96", {}, None, 4 * 480),
        ("gh200-96", {"host_memory_gib": 480.0}, None, 480),
        # one chip of four: the other chips' memory is attached to their own CPUs
        ("gh200-96", {"host_memory_gib": 480.0}, 1, 120),
        ("gh200-96", {"host_memory_gib": 480.0}, 3, 360),
        ("gh200-96", {}, 1, 480),
        ("gb200", {}, None, 2 * 480),
        ("gb200", {"per_node": 1}, None, 480),
        ("gb200", {"per_node": 2}, None, 480),
        # two chips, one with both devices in use: each rank can have half a chip's memory
        ("gb200", {"per_node": 3}, None, 3 * 240),
        ("gb200", {"host_memory_gib": 960.0}, 3, 3 * 240),
        # on other machines a process can use the memory of all sockets
        ("h100-sxm", {"host_memory_gib": 1024.0}, 1, 1024),
    ],
)
def test_host_memory_of_superchips_is_counted_per_chip(
    accelerator: str, fields: dict[str, Any], most: int | None, gib: float
) -> None:
    devices = resolve_hardware(HardwareSpec(accelerator=accelerator, **fields), "bf16", most).devices
    assert devices is not None
    assert devices.host_memory_bytes == gib * 2**30


def test_a_part_of_superchips_has_their_cores_and_bandwidth() -> None:
    spec = HardwareSpec(accelerator="gh200-96", host_cores=288, host_memory_gb_per_s=2048.0)
    devices = resolve_hardware(spec, "bf16", 2).devices
    assert devices is not None
    assert (devices.host_cores, devices.host_memory_bytes_per_s) == (144, 1024e9)


def test_fp8_keeps_the_wide_rate_and_attention() -> None:
    wide, narrow = resolved(accelerator="h100-sxm"), resolved("fp8", accelerator="h100-sxm")
    assert narrow.peak_flops == 1979e12
    assert (narrow.wide_flops, narrow.attention_flops) == (wide.achievable_flops, wide.attention_flops)
    assert wide.wide_flops is None


@pytest.mark.parametrize(
    ("changes", "precision", "code", "path", "said"),
    [
        ({"accelerator": "v100-32"}, "bf16", "PT263", "precision", "fp16, fp32, fp64"),
        ({"accelerator": "t4"}, "bf16", "PT263", "precision", "precision: fp16"),
        ({"accelerator": "a100-80"}, "fp8", "PT263", "precision", "precision: bf16"),
        ({"accelerator": "cpu"}, "fp8", "PT263", "precision", "bf16, fp16, fp32, fp64"),
        ({"accelerator": "h100-sxm", "achievable_tflops": 1200.0}, "bf16", "PT262", "achievable_tflops", "989"),
        ({"accelerator": "h100-sxm", "attention_tflops": 1200.0}, "bf16", "PT262", "attention_tflops", "989"),
        ({"accelerator": "mi300x", "pair_gb_per_s": 500.0}, "bf16", "PT262", "pair_gb_per_s", "448"),
        ({"accelerator": "mi300x", "backend": "cuda"}, "bf16", "PT262", "backend", "leave backend out"),
        ({"accelerator": "h100-sxm", "nodes": 99_999}, "bf16", "PT275", "nodes", "write nodes: 62500"),
        ({"accelerator": "cpu", "nodes": 9_999, "per_node": 1000}, "fp32", "PT275", "nodes", "per_node: 1,000"),
        ({"accelerator": "own", "peak_tflops": 1.0, "memory_gib": 1.0}, "bf16", "PT260", "accelerator", "memory_gb"),
    ],
)
def test_refusals_name_the_field_and_what_works(
    changes: dict[str, Any], precision: Precision, code: str, path: str, said: str
) -> None:
    found = resolve_hardware(HardwareSpec(**changes), precision)
    assert found.devices is None
    assert [finding.code for finding in found.diagnostics] == [code]
    assert found.diagnostics[0].path[-1] == path
    assert said in f"{found.diagnostics[0].message} {found.diagnostics[0].help}"


def test_a_limit_makes_any_cluster_small_enough() -> None:
    limited = resolve_hardware(HardwareSpec(accelerator="h100-sxm", nodes=99_999), "bf16", 4096).devices
    assert limited is not None
    assert (limited.nodes, limited.per_node) == (512, 8)


@pytest.mark.parametrize("field", sorted({*OWN, "domain", "units", "host_cores", "nodes", "per_node"}))
@pytest.mark.parametrize("value", [0, -1, 10**9, float("inf"), float("nan")])
def test_figures_out_of_bounds_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValidationError):
        HardwareSpec.model_validate({field: value})


def test_cpu_ranks_take_the_figures_too() -> None:
    plain = resolved("fp32", accelerator="cpu", per_node=2)
    own = resolved("fp32", accelerator="cpu", per_node=2, memory_gb_per_s=40.0, operator_us=3.0, link_gb_per_s=2.0)
    assert own.memory_bytes_per_s == 20e9
    assert own.operator_s == pytest.approx(3e-6)
    assert own.link_bytes_per_s == 2e9
    assert own.achievable_flops == plain.achievable_flops
    assert plain.host_link_bytes_per_s is None


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA GB300", "gb300"), ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GH200 480GB", "gh200-96"), ("NVIDIA GH200 144G HBM3e", "gh200-144"), ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"), ("NVIDIA H20", "h20"), ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX A6000", "rtx-a6000"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA H800", "h800"), ("NVIDIA A10", "a10"), ("NVIDIA L4", "l4"), ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("Tesla T4", "t4"), ("Tesla V100-SXM2-32GB", "v100-32"), ("NVIDIA A10G", "a10g"),
        ("NVIDIA Unheard-of 7", "NVIDIA Unheard-of 7"),
    ],
)  # fmt: skip
def test_drivers_names(driver_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvidia_names", lambda: [driver_name] * 2)
    machine.this_machine.cache_clear()
    try:
        assert machine.this_machine().accelerator == name
        assert machine.this_machine().devices == 2
    finally:
        machine.this_machine.cache_clear()


@pytest.mark.parametrize(
    ("target", "gib", "name"),
    [(90010, 64, "mi250x"), (90402, 192, "mi300x"), (90402, 256, "mi325x"), (90500, 288, "mi355x")],
)
def test_amd_devices_by_architecture_and_memory(
    target: int, gib: int, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for node, (simds, size) in enumerate([(0, 0), (1216, gib)]):
        (tmp_path / f"{node}/mem_banks/0").mkdir(parents=True)
        (tmp_path / f"{node}/properties").write_text(f"simd_count {simds}\ngfx_target_version {target}\n")
        (tmp_path / f"{node}/mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {size * 2**30}\n")
    monkeypatch.setattr(machine, "_KFD", tmp_path)
    monkeypatch.setattr(machine, "_nvidia_names", list)
    machine.this_machine.cache_clear()
    try:
        assert (machine.this_machine().accelerator, machine.this_machine().devices) == (name, 1)
    finally:
        machine.this_machine.cache_clear()

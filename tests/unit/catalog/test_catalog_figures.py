"""The catalog's tables: every figure has a source with a date, and figures of one machine agree with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from _active import count_active

from partool.catalog.lookup import Table, table
from partool.catalog.models import resolve_model
from partool.spec.model import ModelSpec
from partool_kernels.registry import ARCHITECTURES

MACHINES = ("accelerators", "hosts", "fabrics")
ENTRIES = [(name, key) for name in MACHINES for key in table(name)]  # type: ignore[arg-type]
NAMES = list(table("accelerators"))
ASKED_FOR = {
    "v100-16", "v100-32", "t4", "a10g", "a100-40", "a100-80", "l40s", "rtx-4090", "h100-sxm", "h100-pcie", "h200",
    "b200", "gb200", "b300", "gb300", "gh200-96", "gh200-144", "mi250x", "mi300x", "mi325x", "mi355x", "h800",
    "a10", "l4", "rtx-5090", "rtx-pro-6000", "mi350x",
}  # fmt: skip


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every number in an entry."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from figures(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from figures(item, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def test_the_catalog_has_what_people_train_on() -> None:
    assert set(NAMES) >= ASKED_FOR
    assert set(get_args(Table)) == {*MACHINES, "models", "network_env", "sources"}


@pytest.mark.parametrize(("name", "key"), ENTRIES)
def test_every_figure_has_a_source_with_a_date(name: Any, key: str) -> None:
    entry = table(name)[key]
    known, sources = table("sources"), entry["sources"]
    used = set()
    for path in figures({field: value for field, value in entry.items() if field != "sources"}):
        names = [".".join(path[:length]) for length in range(len(path), 0, -1)]
        found = next((candidate for candidate in names if candidate in sources), None)
        assert found, f"{key}: no source for {names[0]}"
        used.add(found)
        assert known[sources[found]]["text"]
        assert re.fullmatch(r"20\d\d-\d\d", known[sources[found]]["as_of"])
    assert set(sources) == used, f"{key}: sources of figures that are not there"


def test_no_source_is_left_over() -> None:
    used = {source for name in MACHINES for entry in table(name).values() for source in entry["sources"].values()}  # type: ignore[arg-type]
    assert used == set(table("sources"))


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_one_device_agree(name: str) -> None:
    entry = table("accelerators")[name]
    peak, achievable = entry["peak_tflops"], entry["achievable_tflops"]
    assert set(peak) == set(achievable)
    assert {"fp16", "fp32", "fp64"} <= set(peak)
    assert all(0.35 * peak[kind] <= achievable[kind] <= peak[kind] for kind in peak)
    assert ("fp8" in peak) == (entry["fp8_flavour"] in ("ocp", "fnuz"))
    assert all(0.1 < share < 0.8 for share in entry["attention_share"].values())
    # The driver shows up to 9 % less than the nominal size, and never more.
    assert 0.91 * entry["nominal_gib"] <= entry["usable_gib"] <= entry["nominal_gib"]
    assert entry["topology"] in ("switch", "mesh", "none")
    assert (entry["pair_gb_per_s"] is not None) == (entry["topology"] == "mesh")
    pair = entry["pair_gb_per_s"] or entry["link_gb_per_s"]
    assert pair <= entry["link_gb_per_s"] <= pair * max(1, entry["per_node"] - 1)
    assert entry["fabric"] in table("fabrics")
    assert entry["host"] in table("hosts")
    assert 0.5 < entry["host_link_efficiency"] <= 1.0
    limits = entry["kernel_limits"]
    assert limits["lanes"] == (64 if entry["backend"] == "rocm" else 32)
    assert limits["shared_kib_per_block"] <= limits["shared_kib_per_unit"]
    assert (limits["architecture"].startswith("gfx"), bool(entry["gfx"])) == ((entry["backend"] == "rocm"),) * 2


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_kept_for_what_the_catalog_says_of_an_architecture(name: str) -> None:
    """The limits that decide which kernels can run, and the 8-bit type, are stored twice and must agree."""
    entry = table("accelerators")[name]
    kept = ARCHITECTURES.get(entry["kernel_limits"]["architecture"])
    if kept is None:
        assert entry["kernel_limits"]["architecture"] in {
            "sm_70", "sm_75", "sm_86", "sm_89", "sm_103", "sm_120", "gfx90a",
        }  # fmt: skip
        return
    assert kept.backend == {"cuda": "cuda", "rocm": "hip"}[entry["backend"]]
    assert kept.lanes == entry["kernel_limits"]["lanes"]
    assert kept.shared_bytes == entry["kernel_limits"]["shared_kib_per_block"] * 1024
    flavour = {None: None, "ocp": "float8_e4m3fn", "fnuz": "float8_e4m3fnuz"}[entry["fp8_flavour"]]
    assert kept.fp8 == flavour


def test_every_kept_architecture_is_in_the_catalog() -> None:
    known = {entry["kernel_limits"]["architecture"] for entry in table("accelerators").values()}
    assert set(ARCHITECTURES) <= known


@pytest.mark.parametrize("name", [name for name in NAMES if "slices" in table("accelerators")[name]])
def test_figures_of_slices_agree(name: str) -> None:
    """Slices of one profile fit on the device together, and each holds about what its name says."""
    entry = table("accelerators")[name]
    slices = entry["slices"]
    assert len({tuple(column) for column in slices.values()}) == 1
    whole = next(reversed(slices["units"]))
    for profile, units in slices["units"].items():
        parts, gib = map(int, re.fullmatch(r"(\d)g\.(\d+)gb", profile).groups())  # type: ignore[union-attr]
        most, share, usable = (slices[column][profile] for column in ("most", "memory_share", "usable_gib"))
        assert most * units <= entry["units"]
        assert most * share <= 1
        assert most * usable <= entry["usable_gib"] + 1e-9
        assert 0.9 * gib <= usable <= gib
        assert 0.8 <= units / (entry["units"] * parts / int(whole[0])) <= 1.4
    assert slices["memory_share"][whole] == slices["most"][whole] == 1


def test_precisions_by_generation() -> None:
    entries = table("accelerators")
    assert {name for name in NAMES if "bf16" not in entries[name]["peak_tflops"]} == {"v100-16", "v100-32", "t4"}
    assert {name for name in NAMES if entries[name]["fp8_flavour"] == "fnuz"} == {"mi300x", "mi325x"}
    none = {"v100-16", "v100-32", "t4", "a10", "a10g", "rtx-a6000", "a100-40", "a100-80", "mi250x"}
    assert {name for name in NAMES if entries[name]["fp8_flavour"] is None} == none


def test_host_adam_follows_the_memory() -> None:
    """The cost model's 28 bytes per parameter at three quarters of the bandwidth, against measurements on Grace."""
    for entry in table("hosts").values():
        fused = entry["adam_gparams_per_s"]["fused"]
        assert fused == pytest.approx(0.75 * entry["memory_gb_per_s"] / 28, rel=0.05)
    grace = table("hosts")["grace"]["adam_gparams_per_s"]
    assert grace == {"fused": 13.2, "deepspeed": 10.4, "pytorch": 4.4}


def test_fabrics() -> None:
    for entry in table("fabrics").values():
        assert entry["per"] in ("node", "device")
        assert 0.5 < entry["efficiency"] <= 1.0
        assert 1 <= entry["latency_us"] <= 1000


@pytest.mark.parametrize(
    ("name", "active_billions"),
    [("deepseek-v2-lite", 2.7), ("deepseek-v2", 21.4), ("kimi-k2", 32.9), ("llama4-maverick", 17.2)],
)
def test_active_parameters_of_public_experts(name: str, active_billions: float, tmp_path: Any) -> None:
    config = resolve_model(ModelSpec(preset=name), tmp_path).config
    assert config is not None
    assert count_active(config) / 1e9 == pytest.approx(active_billions, rel=0.04)


def test_what_a_preset_leaves_out_is_said(tmp_path: Any) -> None:
    assert "squared ReLU" in resolve_model(ModelSpec(preset="nemotron4-15b"), tmp_path).source
    assert resolve_model(ModelSpec(preset="llama3-8b"), tmp_path).source == "preset llama3-8b"

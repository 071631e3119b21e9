"""MIG slices: figures that scale as NVIDIA's tables say, what plans may do with them, and how jobs ask for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from _k8s_case import EVERY_KIND, IMAGE, templates
from _launch_case import launch_job
from planned import findings_of, plan_of

from partool.catalog.hardware import ResolvedHardware, resolve_hardware
from partool.catalog.lookup import table
from partool.catalog.profile import PROFILE_FILE, apply_profile
from partool.launch.k8s.validate.own_rules import check
from partool.launch.k8s.validate.reading import load_documents, read_manifest
from partool.plan.types import Plan
from partool.render.render import render
from partool.spec.hardware import Devices, HardwareSpec

SLICED = [
    (name, profile)
    for name, entry in table("accelerators").items()
    if "slices" in entry
    for profile in entry["slices"]["units"]
]
SPEC = """\
name: sliced
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: h100-sxm, slice: 3g.40gb}
data: python-stdlib
training: {sequence_length: 64, global_batch: 4}
"""


def resolved(**fields: Any) -> ResolvedHardware:
    return resolve_hardware(HardwareSpec(**fields), "bf16")


def devices_of(**fields: Any) -> Devices:
    found = resolved(**fields)
    assert found.devices is not None, found.diagnostics
    return found.devices


@pytest.mark.parametrize(("name", "profile"), SLICED)
def test_a_slice_has_its_part_of_every_figure(name: str, profile: str) -> None:
    whole, one = devices_of(accelerator=name, per_node=1), devices_of(accelerator=name, slice=profile)
    columns = table("accelerators")[name]["slices"]
    share, most = columns["memory_share"][profile], columns["most"][profile]
    compute = columns["units"][profile] / whole.units
    assert (one.accelerator, one.slice, one.nodes, one.per_node, one.domain) == (name, profile, 1, 1, 0)
    assert one.memory_bytes == int(columns["usable_gib"][profile] * 2**30) <= whole.memory_bytes
    assert one.memory_bytes_per_s == pytest.approx(share * whole.memory_bytes_per_s)
    assert one.units == columns["units"][profile]
    assert whole.peak_flops is not None
    assert one.peak_flops == pytest.approx(compute * whole.peak_flops)
    assert one.achievable_flops == pytest.approx(compute * whole.achievable_flops)
    assert one.attention_flops == pytest.approx(compute * (whole.attention_flops or 0))
    assert (one.topology, one.pair_bytes_per_s) == ("none", None)
    assert one.host_link_bytes_per_s == pytest.approx((whole.host_link_bytes_per_s or 0) / most)
    assert one.link_bytes_per_s == one.host_link_bytes_per_s
    per_node = table("accelerators")[name]["per_node"]
    assert one.host_cores == max(1, whole.host_cores // (most * per_node))
    assert one.host_memory_bytes == pytest.approx((whole.host_memory_bytes or 0) / (most * per_node), abs=1)
    assert one.fabric_bytes_per_s <= whole.fabric_bytes_per_s


def test_figures_of_the_h100_are_those_of_its_driver() -> None:
    one = devices_of(accelerator="h100-sxm", slice="3g.40gb")
    assert (one.units, one.memory_bytes, one.memory_bytes_per_s) == (60, int(39.5 * 2**30), 1675e9)
    assert one.peak_flops == pytest.approx(989e12 * 60 / 132)


def test_figures_of_the_spec_replace_those_of_a_slice() -> None:
    own = devices_of(accelerator="h100-sxm", slice="3g.40gb", memory_gib=30.0, peak_tflops=100.0)
    assert (own.memory_bytes, own.peak_flops) == (30 * 2**30, 100e12)


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        (
            {"accelerator": "h100-sxm", "slice": "3g.20gb"},
            "PT277",
            "its slices: 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g",
        ),
        ({"accelerator": "a100-40", "slice": "3g.40gb"}, "PT277", "3g.20gb"),
        ({"accelerator": "l40s", "slice": "3g.40gb"}, "PT277", "they have: rtx-pro-6000, a100-40"),
        ({"accelerator": "mi300x", "slice": "3g.40gb"}, "PT277", "they have: "),
        ({"accelerator": "cpu", "slice": "3g.40gb"}, "PT277", "they have: "),
        ({"accelerator": "h100-sxm", "slice": "1g.10gb", "per_node": 7}, "PT278", "per_node: 1"),
    ],
)
def test_slices_that_cannot_be_had(fields: dict[str, Any], code: str, said: str) -> None:
    found = resolved(**fields)
    assert found.devices is None
    assert [finding.code for finding in found.diagnostics] == [code]
    assert said in found.diagnostics[0].help


def test_slices_of_several_nodes_are_a_warning() -> None:
    found = resolved(accelerator="h100-sxm", slice="3g.40gb", nodes=4)
    assert found.devices is not None
    assert [(finding.code, finding.severity) for finding in found.diagnostics] == [("PT278", "warning")]
    whole = devices_of(accelerator="h100-sxm", nodes=4)
    assert found.devices.fabric_bytes_per_s == whole.fabric_bytes_per_s / 2  # two slices of 3g share an adapter


def test_this_machines_calibration_is_not_that_of_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured:
        class machine:  # noqa: N801
            accelerator = "h100-sxm"

    (tmp_path / PROFILE_FILE).write_text("{}")
    monkeypatch.setattr("partool.catalog.profile.home", lambda: tmp_path)
    monkeypatch.setattr("partool.catalog.profile.load_profile", lambda path: Measured)
    devices = devices_of(accelerator="h100-sxm", slice="3g.40gb")
    silent = apply_profile(HardwareSpec(accelerator="h100-sxm"), devices, "bf16", base_dir=tmp_path)
    assert (silent.devices, silent.findings) == (devices, ())
    named = HardwareSpec(accelerator="h100-sxm", profile=PROFILE_FILE)
    (finding,) = apply_profile(named, devices, "bf16", base_dir=tmp_path).findings
    assert (finding.code, finding.severity) == ("PT282", "error")
    assert "its slice 3g.40gb" in finding.message


def sliced_plan(*overrides: str) -> Plan:
    return plan_of(SPEC, *overrides)


def test_a_plan_says_its_slice_and_keeps_it() -> None:
    plan = sliced_plan()
    assert plan.devices.slice == "3g.40gb"
    assert Plan.from_json(plan.to_json()).devices == plan.devices
    assert "slice" not in plan_of(SPEC.replace(", slice: 3g.40gb", ", per_node: 1")).devices.model_dump()


def slurm_options(*overrides: str) -> list[str]:
    plan = sliced_plan("launch.target=slurm", "launch.slurm.exclusive=false", *overrides)
    lines = render("slurm", launch_job(plan)).text.splitlines()
    return [line for line in lines if line.startswith("#SBATCH")]


def test_slurm_is_asked_for_the_profile() -> None:
    assert "#SBATCH --gres=gpu:3g.40gb:1" in slurm_options()
    assert "#SBATCH --gres=gpu:nvidia_h100_3g.40gb:1" in slurm_options("launch.slurm.gpu_type=nvidia_h100_3g.40gb")
    assert not [line for line in slurm_options("launch.slurm.gpus=none") if "gpu" in line]


def test_a_whole_node_for_a_slice_is_doubted() -> None:
    codes = [finding.code for finding in findings_of(SPEC + "launch: {target: slurm}\n")]
    assert "PT279" in codes
    codes = [finding.code for finding in findings_of(SPEC + "launch: {target: slurm, slurm: {exclusive: false}}\n")]
    assert "PT279" not in codes


def manifest_text(kind: str, *overrides: str) -> str:
    fields = ("launch.target=k8s", f"launch.image={IMAGE}", f"launch.k8s.kind={kind}", "launch.k8s.storage=pvc:runs")
    return render("k8s", launch_job(sliced_plan(*fields, *overrides))).text


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind != "trainjob"])
def test_kubernetes_is_asked_for_the_profiles_resource(kind: str) -> None:
    text = manifest_text(kind)
    assert check(read_manifest(text)) == []
    for _, template in templates(kind, load_documents(text)[-1]):
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/mig-3g.40gb"] == "1"
        assert "nvidia.com/gpu" not in limits
        assert limits["cpu"] == str(112 // 16 - 2)
        assert "nvidia.com/gpu" in [each["key"] for each in template["spec"]["tolerations"]]


def test_kubernetes_names_slices_as_devices_with_the_strategy_single() -> None:
    text = manifest_text("jobset", "launch.k8s.device_resource=nvidia.com/gpu")
    assert check(read_manifest(text)) == []
    assert "mig-3g" not in text
    assert 'nvidia.com/gpu: "1"' in text


def test_a_manifest_with_whole_devices_for_slices_is_a_finding() -> None:
    text = manifest_text("jobset").replace('nvidia.com/mig-3g.40gb: "1"', 'nvidia.com/gpu: "1"')
    (finding,) = check(read_manifest(text))
    assert (finding.code, "for 1 ranks on a node" in finding.message) == ("PT571", True)


def test_a_slice_that_is_too_small_leads_to_a_larger_one() -> None:
    large = SPEC.replace("{layers: 2, hidden: 64, heads: 4, vocab: 256}", "llama2-13b").replace("3g.40gb", "1g.10gb")
    (finding,) = [each for each in findings_of(large) if each.code == "PT301"]
    assert re.search(r"hardware\.slice: \dg\.\d+gb \(", finding.help)

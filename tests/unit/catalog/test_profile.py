"""Calibration profiles: the file, the figures they replace, and plans checked against the cost model's equations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import result_of

from partool import __version__
from partool.catalog import profile as catalog_profile
from partool.catalog.hardware import resolve_hardware
from partool.catalog.machine import available_cores, processor
from partool.catalog.profile import Applied, apply_profile, narrowed
from partool.catalog.profile_file import (
    MachineId,
    MeasuredFigures,
    Profile,
    ProfileError,
    Scalar,
    StackScalars,
    load_profile,
    save_profile,
)
from partool.cost import collective
from partool.diagnostics.record import Diagnostic
from partool.planner.make import PlanResult
from partool.report.plan_rows import stop_text
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork

MODEL = ModelConfig(layers=2, hidden=64, ffn_hidden=128, heads=4, kv_heads=4, head_dim=16, vocab=256)


def figure(value: float, unit: str = "flop/s") -> dict[str, Any]:
    return {"value": value, "unit": unit, "n": 5, "mad": 0.01 * value}


def line(latency_s: float, bytes_per_s: float) -> dict[str, Any]:
    return {"latency_s": figure(latency_s, "s"), "bytes_per_s": figure(bytes_per_s, "byte/s")}


def made(accelerator: str = "cpu", ranks: int = 2, scalars: tuple[StackScalars, ...] = (), **figures: Any) -> Profile:
    backend = "cpu" if accelerator == "cpu" else "cuda"
    machine = MachineId(
        accelerator=accelerator, processor=processor(), cores=available_cores(), ranks=ranks, backend=backend
    )
    return Profile(
        partool_version=__version__, created="2026-11-21T08:00:00+00:00", complete=True, machine=machine,
        figures=MeasuredFigures.model_validate(figures), scalars=scalars,
    )  # fmt: skip


ALL = {
    "achievable_flops": {"fp32": figure(80e9), "bf16": figure(40e9)},
    "attention_flops": {"fp32": figure(30e9), "bf16": figure(15e9)},
    "stream_bytes_per_s": figure(9e9, "byte/s"),
    "fresh_bytes_per_s": figure(2e9, "byte/s"),
    "operator_s": figure(3e-6, "s"),
    "collectives": {
        "all_gather": line(300e-6, 0.7e9),
        "reduce_scatter": line(300e-6, 0.7e9 / 1.7),
        "all_reduce": line(600e-6, 0.7e9 / 2.7),
    },
    "adam_parameters_per_s": figure(1e9, "parameter/s"),
}


def devices_of(precision: str = "fp32", **spec: Any) -> tuple[HardwareSpec, Devices]:
    hardware = HardwareSpec(**{"accelerator": "cpu", "per_node": 2, **spec})
    found = resolve_hardware(hardware, precision).devices  # type: ignore[arg-type]
    assert found is not None
    return hardware, found


def applied(
    home: Path, profile: Profile | None, precision: str = "fp32", *, named: str | None = None, **spec: Any
) -> tuple[Applied, Devices]:
    if profile is not None:
        save_profile(profile, home / "calibration.json")
    hardware, devices = devices_of(precision, profile=named, **spec)
    return apply_profile(hardware, devices, precision, base_dir=home), devices


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    scalars = (StackScalars(stack="partool", time=Scalar(value=1.1, n=3, spread=0.02)),)
    profile = made(scalars=scalars, **ALL)
    save_profile(profile, tmp_path / "deep" / "p.json")
    assert load_profile(tmp_path / "deep" / "p.json") == profile
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "p.json"]


def test_hashes_name_what_moved() -> None:
    first = made(**ALL)
    scaled = first.model_copy(update={"scalars": (StackScalars(stack="partool"),)})
    faster = made(**{**ALL, "operator_s": figure(2e-6, "s")})
    assert first.figures_hash == scaled.figures_hash != faster.figures_hash
    assert first.scalars_hash != scaled.scalars_hash
    assert made().figures_hash == ""


def test_without_a_profile_nothing_changes(tmp_path: Path) -> None:
    found, devices = applied(tmp_path, None)
    assert found == Applied(devices)


def test_figures_replace_those_of_the_catalog(tmp_path: Path) -> None:
    found, devices = applied(tmp_path, made(**ALL))
    assert found.findings == ()
    assert found.devices.achievable_flops == 80e9
    assert found.devices.attention_flops == 30e9
    assert found.devices.operator_s == 3e-6
    assert found.devices.fresh_bytes_per_s == 2e9
    assert found.devices.memory_bytes == devices.memory_bytes
    assert found.inputs.keys() == {"calibration", "calibration/scalars"}
    assert "2026-11-21" in found.reason


def test_ranks_of_a_cpu_share_its_cores(tmp_path: Path) -> None:
    one = applied(tmp_path, made(**ALL), per_node=1)[0].devices
    four = applied(tmp_path, made(**ALL), per_node=4)[0].devices
    assert (one.achievable_flops, four.achievable_flops) == (160e9, 40e9)
    assert one.memory_bytes_per_s == pytest.approx(4 * four.memory_bytes_per_s)
    assert one.host_memory_bytes_per_s == four.host_memory_bytes_per_s


def test_what_the_spec_gives_wins(tmp_path: Path) -> None:
    spec = {"peak_tflops": 1.0, "memory_gb_per_s": 7.0, "link_gb_per_s": 3.0}
    found, devices = applied(tmp_path, made(**ALL), **spec)
    for name in ("achievable_flops", "attention_flops", "memory_bytes_per_s", "link_bytes_per_s"):
        assert getattr(found.devices, name) == getattr(devices, name)
    assert found.devices.operator_s == 3e-6


def test_calibrations_before_storage_was_measured_keep_their_hash() -> None:
    assert "storage_bytes_per_s" not in made(**ALL).model_dump(mode="json")["figures"]
    assert made(**ALL, storage_bytes_per_s=figure(2e8)).figures_hash != made(**ALL).figures_hash


@pytest.mark.parametrize(
    ("measured", "nodes", "expected"), [(3e8, 1, 3e8), (5e9, 1, 5e9), (3e8, 4, 3e8), (5e9, 4, 1e9)]
)
def test_one_node_alone_says_only_how_slow_storage_is_for_all(
    tmp_path: Path, measured: float, nodes: int, expected: float
) -> None:
    profile = made("h100-sxm", storage_bytes_per_s=figure(measured, "byte/s"))
    found, _ = applied(tmp_path, profile, "bf16", accelerator="h100-sxm", nodes=nodes)
    assert found.devices.storage_bytes_per_s == expected


def test_a_plan_takes_the_measured_rate_of_checkpoints_and_says_so(tmp_path: Path) -> None:
    assumed = planned(tmp_path).plan
    save_profile(made(storage_bytes_per_s=figure(1e4, "byte/s")), tmp_path / "calibration.json")
    measured, written = planned(tmp_path).plan, planned(tmp_path, "hardware.storage_gb_per_s=2").plan
    assert assumed is not None
    assert measured is not None
    assert written is not None
    assert assumed.stopping is not None
    assert measured.stopping is not None
    assert measured.stopping.write_s == pytest.approx(measured.stopping.checkpoint_bytes / 1e4)
    assert measured.launch.window_s > assumed.launch.window_s == 60
    assert " at 1 GB/s;" in stop_text(assumed)
    assert " at 1e-05 GB/s (partool calibrate);" in stop_text(measured)
    assert " at 2 GB/s;" in stop_text(written)


@pytest.mark.parametrize("accelerator", ["cpu", "mi300x"])
def test_the_cost_model_gives_back_the_measured_collectives(tmp_path: Path, accelerator: str) -> None:
    slow = collective._REDUCE_SLOWDOWN["cpu" if accelerator == "cpu" else "rocm"]
    lines = {
        "all_gather": line(2e-4, 1e9),
        "reduce_scatter": line(2e-4, 1e9 / slow),
        "all_reduce": line(4e-4, 1e9 / (1 + slow)),
    }
    profile = made(accelerator, ranks=4, collectives=lines)
    found, _ = applied(tmp_path, profile, "bf16", accelerator=accelerator, per_node=4)
    job = TrainingWork(MODEL, found.devices, 128, "bf16", global_batch=8)
    ranks = collective.group(job, 4, 1)
    moved = 8e6 * 3 / 4
    assert float(collective.gather_s(job, 8e6, ranks)) == pytest.approx(2e-4 + moved / 1e9)
    assert float(collective.reduce_scatter_s(job, 8e6, ranks)) == pytest.approx(2e-4 + slow * moved / 1e9)
    assert float(collective.all_reduce_s(job, 8e6, ranks)) == pytest.approx(4e-4 + (1 + slow) * moved / 1e9)


def test_measured_collectives_scale_tables(tmp_path: Path) -> None:
    """Times keep the tables' form; start and rate are those of the machine, as the median of the operations."""
    table = HardwareSpec(accelerator="h100-sxm", per_node=4)
    usual = resolve_hardware(table, "bf16").devices
    assert usual is not None
    lines = {"all_gather": line(2e-5, 1e11)}
    profile = made("h100-sxm", ranks=4, collectives=lines)
    found, _ = applied(tmp_path, profile, "bf16", accelerator="h100-sxm", per_node=4)
    job = TrainingWork(MODEL, found.devices, 128, "bf16", global_batch=8)
    before = TrainingWork(MODEL, usual, 128, "bf16", global_batch=8)
    ranks = collective.group(job, 4, 1)
    assert float(collective.gather_s(job, 0.0, ranks)) == pytest.approx(2e-5)
    assert float(collective.gather_s(job, 2.0**29, ranks)) == pytest.approx(2e-5 + 2.0**29 * 3 / 4 / 1e11)
    slower = [float(collective.all_reduce_s(job, size, ranks) / collective.all_reduce_s(before, size, ranks))
              for size in (1e3, 1e9)]  # fmt: skip
    gathers = [float(collective.gather_s(job, size, ranks) / collective.gather_s(before, size, ranks))
               for size in (1e3, 1e9)]  # fmt: skip
    assert slower == pytest.approx(gathers, rel=0.05)


@pytest.mark.parametrize("measured_ranks", [2, 4])
def test_pairs_of_a_mesh_take_the_measured_times(tmp_path: Path, measured_ranks: int) -> None:
    """The links between the measured ranks say how fast one pair is, and how fast all pairs of a rank are together."""
    profile = made("gh200-96", ranks=measured_ranks, collectives={"all_gather": line(2e-5, 3e10 * measured_ranks)})
    found, usual = applied(tmp_path, profile, "bf16", accelerator="gh200-96", per_node=4)
    measured, catalog = found.devices, usual
    assert measured.pair_bytes_per_s is not None
    assert catalog.pair_bytes_per_s is not None
    assert measured.pair_bytes_per_s / catalog.pair_bytes_per_s == pytest.approx(
        measured.link_bytes_per_s / catalog.link_bytes_per_s
    )
    job = TrainingWork(MODEL, measured, 128, "bf16", global_batch=8)
    ranks = collective.group(job, measured_ranks, 1)
    moved = 2.0**29 * (measured_ranks - 1) / measured_ranks
    expected = 2e-5 + moved / (3e10 * measured_ranks)
    assert float(collective.gather_s(job, 2.0**29, ranks)) == pytest.approx(expected)


def test_pairs_of_a_mesh_without_tables_scale_as_well(tmp_path: Path) -> None:
    profile = made("v100-32", ranks=8, collectives={"all_gather": line(2e-5, 5e10)})
    found, usual = applied(tmp_path, profile, "fp16", accelerator="v100-32", per_node=8)
    assert found.devices.pair_bytes_per_s is not None
    assert usual.pair_bytes_per_s is not None
    faster = found.devices.link_bytes_per_s / usual.link_bytes_per_s
    assert found.devices.pair_bytes_per_s == pytest.approx(faster * usual.pair_bytes_per_s)
    job = TrainingWork(MODEL, found.devices, 128, "fp16", global_batch=8)
    seconds = float(collective.gather_s(job, 1e9, collective.group(job, 8, 1)))
    assert seconds == pytest.approx(2e-5 + 1e9 * 7 / 8 / 5e10)


def test_shares_are_those_of_the_cost_model() -> None:
    from partool.cost.time import attention
    from partool.cost.training import offload
    from partool.work.stacks import PARTOOL
    from partool_runtime.calibrate.items import NARROW_HEADS

    assert attention._head_share(64) / attention._head_share(128) == NARROW_HEADS
    assert catalog_profile._HOST_LINK_SHARE == offload._LINK_SHARE
    assert (offload._HOST_BYTES, PARTOOL.host_share) == (catalog_profile._ADAM_BYTES, catalog_profile._ADAM_SHARE)


def test_a_profile_of_an_accelerator_serves_plans_for_it_only(tmp_path: Path) -> None:
    profile = made("h100-sxm", achievable_flops={"bf16": figure(700e12)})
    found, _ = applied(tmp_path, profile, "bf16", accelerator="h100-sxm", per_node=8)
    assert found.devices.achievable_flops == 700e12
    for other in ("cpu", "a100-80"):
        unchanged, devices = applied(tmp_path, profile, "bf16", accelerator=other)
        assert unchanged == Applied(devices)


def test_scalars_come_with_narrower_errors(tmp_path: Path) -> None:
    scalars = StackScalars(
        stack="partool", time=Scalar(value=1.2, n=4, spread=0.05), memory=Scalar(value=0.9, n=1, spread=0.0)
    )
    found, devices = applied(tmp_path, made(scalars=(scalars,)))
    assert (found.time_scalar, found.memory_scalar) == (1.2, 0.9)
    assert found.devices == devices
    assert found.time_error(0.2) == pytest.approx(((0.2**2 + 4 * 0.05**2) / 5) ** 0.5)
    assert "median of 4 runs" in found.reason
    assert "median of 1 run)" in found.reason


def test_no_number_of_runs_brings_certainty() -> None:
    errors = [narrowed(0.2, Scalar(value=1.0, n=n, spread=0.0)) for n in (1, 4, 100, 10**6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.02
    assert narrowed(0.2, None) == 0.2


BROKEN = {
    "PT280": ['{"profile_ver', "[]x", '{"profile_version": 1}'],
    "PT281": ['{"profile_version": 2}', "[]", "{}"],
}


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in BROKEN.items() for text in texts])
def test_a_broken_profile_is_a_warning_and_an_error_where_it_is_named(tmp_path: Path, code: str, text: str) -> None:
    (tmp_path / "calibration.json").write_text(text)
    found, devices = applied(tmp_path, None)
    assert [(f.code, f.severity) for f in found.findings] == [(code, "warning")]
    assert (found.devices, found.inputs) == (devices, {})
    named, _ = applied(tmp_path, None, named="calibration.json")
    assert [(f.code, f.severity, f.path) for f in named.findings] == [(code, "error", ("hardware", "profile"))]


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), "fast"])
def test_impossible_figures_are_damage(tmp_path: Path, value: Any) -> None:
    content = made(**ALL).model_dump(mode="json")
    content["figures"]["stream_bytes_per_s"]["value"] = value
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=r"damaged: figures.stream_bytes_per_s.value"):
        load_profile(tmp_path / "p.json")


def test_a_named_profile_must_exist(tmp_path: Path) -> None:
    found, _ = applied(tmp_path, None, named="missing.json")
    assert [(f.code, f.severity) for f in found.findings] == [("PT280", "error")]
    assert "No such file" in found.findings[0].message


def one_finding(found: Applied) -> Diagnostic:
    (finding,) = found.findings
    assert finding.help
    return finding


def test_a_profile_of_another_machine_is_not_used(tmp_path: Path) -> None:
    profile = made(**ALL)
    machine = profile.machine.model_copy(update={"cores": 999})
    found, devices = applied(tmp_path, profile.model_copy(update={"machine": machine}))
    finding = one_finding(found)
    assert (finding.code, finding.severity, found.devices) == ("PT282", "warning", devices)
    assert "999 cores" in finding.message
    save_profile(made("h100-sxm", **ALL), tmp_path / "h100.json")
    named, _ = applied(tmp_path, None, named="h100.json")
    assert (one_finding(named).code, one_finding(named).severity) == ("PT282", "error")
    assert "it is for h100-sxm, the plan for cpu" in one_finding(named).message


def test_a_precision_that_was_not_measured_is_named(tmp_path: Path) -> None:
    found, devices = applied(tmp_path, made(**ALL), "fp64")
    finding = one_finding(found)
    assert (finding.code, finding.severity) == ("PT283", "warning")
    assert found.devices.achievable_flops == devices.achievable_flops
    assert found.devices.operator_s == 3e-6


def test_memory_scales_term_by_term_and_is_surer_after_runs() -> None:
    from dataclasses import replace

    from partool.cost.case import Layouts
    from partool.cost.training.peak import peak_memory

    job = TrainingWork(MODEL, devices_of()[1], 128, "fp32", global_batch=8)
    before = peak_memory(job, Layouts())
    after = peak_memory(replace(job, memory_scalar=1.5, memory_runs=3, memory_spread=0.01), Layouts())
    for name, size_bytes in before.terms.items():
        assert float(after.terms[name]) == pytest.approx(1.5 * float(size_bytes), abs=2)
    prior = float(before.sigma_bytes / before.total_bytes)
    expected = narrowed(prior, Scalar(value=1.5, n=3, spread=0.01))
    assert float(after.sigma_bytes / after.total_bytes) == pytest.approx(expected, rel=1e-3)


SPEC = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 2}
training: {sequence_length: 64, global_batch: 8, precision: fp32}
data: python-stdlib
"""


def planned(tmp_path: Path, *overrides: str) -> PlanResult:
    return result_of(SPEC, *overrides, folder=tmp_path, name="case")


def test_plans_take_figures_and_scalars_and_name_them(tmp_path: Path) -> None:
    pins = ("parallel.data.zero=1", "parallel.micro_batch=4", "parallel.recompute=none")
    before = planned(tmp_path, *pins).plan
    save_profile(made(**ALL), tmp_path / "calibration.json")
    measured = planned(tmp_path, *pins).plan
    scalars = StackScalars(
        stack="partool", time=Scalar(value=1.5, n=8, spread=0.03), memory=Scalar(value=1.25, n=8, spread=0.01)
    )
    save_profile(made(scalars=(scalars,), **ALL), tmp_path / "elsewhere.json")
    (tmp_path / "calibration.json").unlink()
    scaled = planned(tmp_path, *pins, "hardware.profile=elsewhere.json").plan
    assert before is not None
    assert measured is not None
    assert scaled is not None
    assert "calibration" not in before.inputs
    assert measured.inputs["calibration"] == scaled.inputs["calibration"]
    assert measured.inputs["calibration/scalars"] != scaled.inputs["calibration/scalars"]
    assert measured.devices.achievable_flops == 80e9 != before.devices.achievable_flops
    assert any("2026-11-21" in reason for reason in measured.reasons)
    assert any("median of 8 runs" in reason for reason in scaled.reasons)
    time, longer = measured.prediction.time, scaled.prediction.time
    assert longer.step_time_s == pytest.approx(1.5 * time.step_time_s)
    assert sum(longer.terms_s.values()) == pytest.approx(longer.step_time_s)
    assert all(longer.terms_s[name] == pytest.approx(1.5 * value) for name, value in time.terms_s.items())
    memory, larger = measured.prediction.memory, scaled.prediction.memory
    assert larger.total_bytes == pytest.approx(1.25 * memory.total_bytes, rel=1e-5)
    assert sum(larger.terms_bytes.values()) == larger.total_bytes
    assert larger.sigma_bytes / larger.total_bytes < memory.sigma_bytes / memory.total_bytes
    assert scaled.prediction.relative_error < measured.prediction.relative_error == before.prediction.relative_error
    assert (scaled.prediction.time_scalar, scaled.prediction.memory_scalar) == (1.5, 1.25)


def test_a_plan_goes_on_without_a_damaged_calibration_unless_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{")
    found = planned(tmp_path)
    assert found.plan is not None
    assert [finding.code for finding in found.plan.findings] == ["PT280"]
    named = planned(tmp_path, "hardware.profile=calibration.json")
    assert named.plan is None
    assert "PT280" in {finding.code for finding in named.diagnostics}

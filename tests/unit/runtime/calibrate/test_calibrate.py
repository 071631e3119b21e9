"""``partool calibrate``: fits of hand-made points, a real measurement at tiny sizes, and scalars from finished runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from partool import __version__
from partool.catalog.profile_file import load_profile
from partool.cli import calibrate as cli
from partool.cli.main import run
from partool.plan.run_fit import fit_scalars, scalar
from partool.plan.run_rows import append_row
from partool_runtime.calibrate.__main__ import _add_storage
from partool_runtime.calibrate.fit import alpha_beta, figures, summary
from partool_runtime.calibrate.storage import storage_line


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "SIZES", {True: "tiny", False: "tiny"})


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run(["calibrate", *arguments])
    shown = capsys.readouterr()
    return (end.value.code if isinstance(end.value.code, int) else 0), shown.out, shown.err


def test_summary() -> None:
    assert summary([1.0, 5.0, 2.0, 2.0, 100.0]) == (5, 2.0, 1.0)


@pytest.mark.parametrize(("alpha", "beta"), [(3e-4, 1e-9), (0.0, 2e-10), (1e-5, 1e-11)])
def test_a_planted_line_is_found(alpha: float, beta: float) -> None:
    points = [(size, alpha + beta * size) for size in (1e4, 1e5, 1e6, 1e7, 1e8)]
    assert alpha_beta(points) == pytest.approx((alpha, beta), rel=1e-6, abs=1e-15)


def test_small_and_large_sizes_weigh_the_same() -> None:
    """A 10 % error at a large size must not hide the latency, which is about 1e-4 of that point's time."""
    points = [(size, 3e-4 + 1e-9 * size) for size in (1e3, 1e4, 1e5, 1e9)]
    points[-1] = (1e9, 1.1)
    alpha, beta = alpha_beta(points)
    assert alpha == pytest.approx(3e-4, rel=0.02)
    assert beta == pytest.approx(1.1e-9, rel=0.05)


def test_a_start_time_is_never_negative() -> None:
    assert alpha_beta([(1.0, 0.5), (2.0, 3.0), (3.0, 6.0)])[0] == 0.0


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)], [(1.0, 2.0), (2.0, 1.0)]])
def test_points_without_a_line_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match=r"line|grow"):
        alpha_beta(points)


def item(kind: str, name: str, work: float, seconds: float, precision: str = "fp32", unit: str = "flop") -> Any:
    return {
        "kind": kind, "name": name, "precision": precision, "work": work, "work_unit": unit, "seconds": seconds,
        "mad_s": 0.1 * seconds, "n": 7,
    }  # fmt: skip


def test_figures_by_hand() -> None:
    measured = [
        *(item("gemm", "", rate, 1.0) for rate in (10.0, 20.0, 60.0)),
        *(
            item("collective", f"all_gather {size}", size, 1e-3 + size * 3 / 4 / 1e9, unit="byte")
            for size in (1e5, 1e7)
        ),
        item("collective", "all_reduce 1", 1e5, 1e-3, unit="byte"),
        item("operator", "", 200.0, 1e-3, unit="operator"),
        item("fresh", "", 8.0, 4.0, unit="byte"),
        item("host_link", "up", 8.0, 1.0, unit="byte"),
        item("host_link", "down", 6.0, 1.0, unit="byte"),
        item("storage", "", 9.0, 3.0, unit="byte"),
    ]
    on_cpu, on_cuda = figures(measured, "cpu", 4), figures(measured, "cuda", 4)
    assert on_cpu["achievable_flops"]["fp32"] == {"value": 20.0, "unit": "flop/s", "n": 21, "mad": 10.0}
    assert on_cuda["achievable_flops"]["fp32"]["value"] == 60.0
    assert on_cpu["operator_s"]["value"] == pytest.approx(5e-6)
    assert on_cpu["fresh_bytes_per_s"]["value"] == 2.0
    assert on_cpu["host_link_bytes_per_s"]["value"] == 6.0
    assert on_cpu["storage_bytes_per_s"] == {"value": 3.0, "unit": "byte/s", "n": 7, "mad": pytest.approx(0.3)}
    assert on_cpu["collectives"].keys() == {"all_gather"}
    assert on_cpu["collectives"]["all_gather"]["latency_s"]["value"] == pytest.approx(1e-3)
    assert on_cpu["collectives"]["all_gather"]["bytes_per_s"]["value"] == pytest.approx(1e9)
    assert "attention_flops" not in on_cpu


@pytest.mark.timeout(60)
def test_a_real_measurement_of_two_ranks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capfd, "--quick", "--ranks", "2", "--output", "json")
    assert code == 0
    profile = load_profile(tmp_path / "calibration.json")
    assert json.loads(out) == profile.model_dump(mode="json")
    assert profile.complete
    assert (profile.machine.accelerator, profile.machine.ranks) == ("cpu", 2)
    assert {"fp32", "bf16"} <= profile.figures.achievable_flops.keys()
    assert 1e8 < profile.figures.achievable_flops["fp32"].value < 1e14
    assert profile.figures.operator_s is not None
    assert 1e-7 < profile.figures.operator_s.value < 1e-3
    kinds = {m.kind for m in profile.measurements}
    assert kinds == {"gemm", "attention", "memory", "fresh", "operator", "collective", "adam", "storage"}
    assert profile.figures.storage_bytes_per_s is not None
    assert 1e4 < profile.figures.storage_bytes_per_s.value < 1e12
    assert [entry.name for entry in tmp_path.iterdir()] == ["calibration.json"]
    assert {m.kind for m in profile.measurements if m.elements} == {"gemm"}
    assert {m.kind for m in profile.measurements if m.sides} == {"gemm", "attention", "collective"}
    products = [m for m in profile.measurements if m.kind == "gemm"]
    assert all(m.name.endswith("x".join(map(str, m.sides))) for m in products)
    assert {(m.kind, m.length) for m in profile.measurements if m.length} == {("attention", 64)}
    assert f"[{len(profile.measurements)}/{len(profile.measurements)}]" in err


@pytest.mark.parametrize(("seconds", "written"), [(3600.0, 3 << 20), (0.0, 3 << 16)])
def test_writes_to_the_storage_of_runs(tmp_path: Path, seconds: float, written: int) -> None:
    """A folder that does not exist yet is on its parent's file system; slow storage gets less to write."""
    line = storage_line(tmp_path / "new" / "runs", 3, 3 << 20, seconds)
    assert (line["kind"], line["n"], line["work"]) == ("storage", 3, written)
    assert 0.0 < line["seconds"] < 60.0
    assert list(tmp_path.iterdir()) == []


def test_storage_that_cannot_be_measured_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [{"machine": {}, "items": 4}]
    _add_storage(lines, Path("/proc/runs"), 2, "tiny")
    assert lines == [{"machine": {}, "items": 4}]
    assert capsys.readouterr().err == "partool: writes to /proc are not measured: only 0 MiB are free\n"


@pytest.mark.timeout(60)
def test_an_interrupt_keeps_what_was_measured() -> None:
    command = [sys.executable, "-P", "-m", "partool_runtime.calibrate", "--sizes", "quick", "--ranks", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert "gemm fp32" in first
    result = json.loads(out)
    assert (process.returncode, result["complete"]) == (130, False)
    assert len(result["measurements"]) >= 1


def test_a_failed_rank_is_an_error_and_nothing_is_written(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    code, out, err = call(capfd, "--quick", "--ranks", "1")
    assert (code, out) == (3, "")
    assert "error[PT284]" in err
    assert not (tmp_path / "calibration.json").exists()


def row(run_id: str = "a", **changes: Any) -> dict[str, str]:
    values = {
        "url_or_repo_path": run_id, "gpu": "cpu", "stack": "partool", "partool_version": __version__, "calibration": "",
        "time_scalar": 1.0, "memory_scalar": 1.0, "steps": 50, "step_time_s": 1.0, "predicted_step_time_s": 1.0,
        "predicted_memory_bytes": 100, "measured_memory_bytes": 100,
    }  # fmt: skip
    return {name: str(value) for name, value in (values | changes).items()}


def fit(*rows: dict[str, str], figures_hash: str = "") -> Any:
    return fit_scalars(rows, accelerator="cpu", figures_hash=figures_hash, version=__version__)


def test_scalars_by_hand() -> None:
    found = fit(
        row("a", step_time_s=1.1, measured_memory_bytes=150),
        row("b", step_time_s=1.2, measured_memory_bytes=""),
        row("c", step_time_s=2.6, predicted_step_time_s=2.0, predicted_memory_bytes=0),
    )
    (scalars,) = found.scalars
    assert (scalars.stack, scalars.time.n, scalars.memory.n) == ("partool", 3, 1)
    assert scalars.time.value == pytest.approx(1.2)
    assert scalars.time.spread == pytest.approx(1.4826 * 0.0800427, rel=1e-4)
    assert (scalars.memory.value, scalars.memory.spread) == (pytest.approx(1.5), 0.0)
    assert scalar([]) is None


def test_scalars_that_predictions_held_do_not_count_twice() -> None:
    found = fit(row("a", step_time_s=1.5, predicted_step_time_s=1.5, time_scalar=1.5))
    assert found.scalars[0].time.value == pytest.approx(1.5)


def test_rows_that_do_not_compare_are_left_out_with_the_reason() -> None:
    found = fit(
        row("a", steps=20, step_time_s=1.1),
        row("a", steps=40, step_time_s=1.3),
        row("a", steps=30, step_time_s=1.2),
        row("b", steps=9),
        row("c", gpu="h100-sxm"),
        row("d", partool_version="0.0.1"),
        row("e", calibration="other"),
        row("f", predicted_step_time_s=""),
        row("g", step_time_s="fast"),
    )
    assert found.scalars[0].time.value == pytest.approx(1.3)
    assert found.left_out == {
        "another attempt of the run was longer": 2,
        "fewer than 10 steps": 1,
        "not on cpu": 1,
        "predicted by another version of partool": 1,
        "predicted with other figures of the machine": 1,
        "no prediction of partool beside the measurement": 2,
    }
    assert fit(row("a"), figures_hash="mine").scalars == ()


def test_from_runs_writes_scalars_without_any_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, seconds in enumerate((1.2, 1.1, 1.3)):
        append_row(tmp_path / "measured_runs.csv", row(f"run-{number}", step_time_s=seconds))
    append_row(tmp_path / "measured_runs.csv", row("short", steps=3))
    code, out, err = call(capsys, "--from-runs")
    assert code == 0
    assert "step time measured over predicted 1.200" in out
    assert "1 fewer than 10 steps" in err
    profile = load_profile(tmp_path / "calibration.json")
    assert profile.scalar("partool").time.value == pytest.approx(1.2)  # type: ignore[union-attr]
    assert profile.scalar("megatron").time is None


def test_from_runs_without_rows_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = call(capsys, "--from-runs")
    assert code == 1
    assert "PT285" in err
    append_row(tmp_path / "rows.csv", row("a", gpu="mi300x"))
    code, _, err = call(capsys, "--from-runs", str(tmp_path / "rows.csv"))
    assert code == 1
    assert "none of the 1 rows" in err
    assert "1 not on cpu" in err
    assert not (tmp_path / "calibration.json").exists()


@pytest.mark.parametrize("arguments", [["rows.csv"], ["--from-runs", "--quick"], ["--ranks", "0"]])
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert call(capsys, *arguments)[0] == 2

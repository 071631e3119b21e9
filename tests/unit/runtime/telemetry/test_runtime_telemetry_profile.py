"""Profiles of steps on one process: as planned, on request, and their traces as the report reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from partool.plan.profiling import ProfileRequest, folder_of, request_file, trace_file, traces, write_request
from partool.report.step_profile import read_profile
from partool.spec.telemetry import ProfileSpec
from partool_runtime.telemetry import profile as module
from partool_runtime.telemetry.profile import FLAGS, StepProfiler, snapshot_of_failure

CPU = torch.device("cpu")


def run(profiler: StepProfiler, first: int, last: int) -> list[tuple[int, int]]:
    """Run steps; return the profiles that ended in them."""
    ended = []
    weight = torch.randn(67, 67, dtype=torch.float64)
    for step in range(first, last + 1):
        profiler.before(step)
        weight = (weight @ weight).tanh()
        profiler.heard(profiler.flags(), step)
        ended.append(profiler.after(step))
    return [one for one in ended if one is not None]


def test_planned_steps_leave_a_trace(tmp_path: Path) -> None:
    planned = ProfileSpec(steps=[3, 4], ranks=[1, 2])
    other, mine = (StepProfiler(tmp_path / str(rank), rank, CPU, planned=planned) for rank in (0, 2))
    assert run(other, 1, 6) == run(mine, 1, 6) == [(3, 4)]
    assert not traces(tmp_path / "0")
    ((steps, rank, path),) = traces(tmp_path / "2")
    assert (steps, rank, path) == ((3, 4), 2, trace_file(folder_of(tmp_path / "2", 3, 4), 2))
    profile = read_profile(path)
    assert profile.steps == (3, 4)
    assert profile.device == "cpu"
    assert {"aten::mm", "aten::tanh"} <= {one.name for one in profile.kernels}
    assert next(one.calls for one in profile.kernels if one.name == "aten::mm") == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_request_waits_for_an_exchange_and_is_taken_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    profiler = StepProfiler(tmp_path, 0, CPU)
    assert profiler.flags() == [0.0] * FLAGS
    write_request(tmp_path, ProfileRequest(steps=2))
    assert profiler.flags() == profiler.flags() == [2.0, 0.0, 0.0, 0.0]  # a step in which ranks exchanged nothing
    assert not request_file(tmp_path).exists()
    assert run(profiler, 5, 9) == [(6, 7)]
    assert profiler.flags() == [0.0] * FLAGS
    assert [steps for steps, _, _ in traces(tmp_path)] == [(6, 7)]


def test_what_fails_is_said_and_stops_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    said: list[str] = []
    (tmp_path / "profile").mkdir()
    request_file(tmp_path).write_text("{", encoding="utf-8")
    profiler = StepProfiler(tmp_path, 0, CPU, planned=ProfileSpec(steps=[2, 2]), warn=said.append)
    (tmp_path / "profile" / "steps-2-2").touch()
    assert run(profiler, 1, 3) == [(2, 2)]
    assert len(said) == 2
    assert said[0].startswith("the request for a profile cannot be read")
    assert "steps-2-2 could not be written" in said[1]
    assert snapshot_of_failure(tmp_path, 0, torch.OutOfMemoryError("full")) is None  # there is no GPU here


def test_a_full_gpu_leaves_a_snapshot(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "dump_snapshot", lambda file: file.write_bytes(b"blocks"))
    assert snapshot_of_failure(tmp_path, 3, RuntimeError("another error")) is None
    file = snapshot_of_failure(tmp_path, 3, torch.OutOfMemoryError("full"))
    assert file is not None
    assert file.name == "out-of-memory-rank-3.pickle"
    assert file.read_bytes() == b"blocks"


def test_a_run_that_ends_within_a_profile_leaves_no_trace(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 0, CPU, planned=ProfileSpec(steps=[2, 5]))
    assert run(profiler, 1, 3) == []
    profiler.close()
    profiler.close()
    assert not traces(tmp_path)
    resumed = StepProfiler(tmp_path, 0, CPU, planned=ProfileSpec(steps=[2, 2]))
    assert run(resumed, 5, 9) == []  # a resumed attempt is past the planned steps

"""Summaries of torch's traces: made-up traces of a GPU and of a CPU, whose shares are known."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from planned import plan_of
from rich.console import Console

from partool.plan.profiling import ProfileRequest, request_file, take_request, trace_file, traces, write_request
from partool.plan.record import DamagedRecordError
from partool.report.profile_words import profile_data, render_profile, sentences
from partool.report.step_profile import overlap, profile_of, read_profile, union

NODE = """\
model: gpt2
hardware: {accelerator: h100-sxm, per_node: 2}
data: python-stdlib
training: {sequence_length: 256, global_batch: 8}
"""


def event(name: str, category: str, start_ms: float, stop_ms: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    times = {"ts": 7e9 + start_ms * 1e3, "dur": (stop_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": 3, "tid": thread, **times, **more}


def steps(*spans_ms: tuple[float, float]) -> list[dict[str, Any]]:
    return [event(f"partool step {10 + at}", "user_annotation", *span) for at, span in enumerate(spans_ms)]


GPU = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "python"}},
        *steps((0, 50), (50, 90)),
        event("aten::mm", "cpu_op", 1, 4),
        event("gemm", "kernel", 10, 40, 7),
        event("gemm", "kernel", 45, 60, 7),
        event("softmax", "kernel", 60, 65, 7),
        event("Memcpy HtoD", "gpu_memcpy", 65, 66, 8),
        # 35 to 52: exposed from 40 to 45
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 35, 52, 9),
        # 70 to 100: exposed; its name comes from the profiler's argument; 90 to 100 is after the host's last step
        event("ncclDevKernel_Generic", "kernel", 70, 100, 9, args={"Collective name": "reduce_scatter_tensor"}),
        event("ncclDevKernel_AllGather_RING", "kernel", 80, 95, 10),  # inside the one before
    ]
}
CPU = {
    "traceEvents": [
        *steps((0, 100)),
        event("aten::linear", "cpu_op", 10, 50),
        event("aten::addmm", "cpu_op", 15, 45),
        event("c10d::allreduce_", "cpu_op", 50, 51),
        event("gloo:all_reduce", "user_annotation", 40, 80, 2),
        event("aten::mul", "cpu_op", 90, 95),
    ]
}


def test_a_trace_of_a_gpu() -> None:
    profile = profile_of(GPU)
    assert profile.device == "gpu"
    assert profile.steps == (10, 11)
    assert profile.step_s == pytest.approx(0.050)  # from 0 to 100 ms, two steps
    assert profile.compute_s == pytest.approx(0.0255)  # 30 + 15 + 5 + 1
    assert profile.exposed_s == pytest.approx({"reducescatter": 0.015, "allreduce": 0.0025})
    assert profile.idle_s == pytest.approx(0.007)  # 0 to 10 and 66 to 70
    assert [(one.name, one.calls) for one in profile.kernels[:2]] == [("gemm", 2), ("softmax", 1)]
    assert profile.kernels[0].seconds == pytest.approx(0.0225)
    assert not profile.host_bound


def test_a_trace_of_a_cpu() -> None:
    profile = profile_of(CPU)
    assert profile.device == "cpu"
    assert profile.compute_s == pytest.approx(0.045)
    assert profile.exposed_s == pytest.approx({"allreduce": 0.030})  # 50 to 80
    assert profile.idle_s == pytest.approx(0.025)
    assert profile.host_bound
    times = {one.name: one.seconds for one in profile.kernels}
    assert times == pytest.approx({"aten::addmm": 0.030, "aten::linear": 0.010, "aten::mul": 0.005})


def test_words_name_the_plans_terms_and_what_bounds_the_step() -> None:
    plan = plan_of(NODE)
    cpu, gpu = sentences(profile_of(CPU), plan), sentences(profile_of(GPU), plan)
    assert cpu[0].startswith("step 10: 100 ms under the profiler, ")
    assert gpu[0].startswith("steps 10 to 11: 50 ms each under the profiler, ")
    assert "25% of the step" in cpu[1]
    assert "host-bound" in cpu[1]
    assert "host-bound" not in gpu[1]
    assert "(reducescatter 15 ms, allreduce 2.5 ms)" in gpu[2]
    stream = io.StringIO()
    render_profile(profile_of(GPU), plan, "run, rank 0", Console(file=stream, width=80))
    assert "gemm" in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) <= 80
    data = profile_data(profile_of(GPU), plan)
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"traceEvents": [{"ph": "X"}, 5, {"ph": "X", "name": "partool step 1", "ts": null}]}', b"["],
)
def test_damaged_traces_are_refused(tmp_path: Path, content: bytes) -> None:
    file = trace_file(tmp_path, 0)
    file.write_bytes(gzip.compress(content))
    with pytest.raises(DamagedRecordError):
        read_profile(file)
    file.write_bytes(content)
    with pytest.raises(DamagedRecordError):
        read_profile(file)


def test_intervals() -> None:
    merged = union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)])
    assert merged == [(0.0, 2.5), (3.0, 4.0)]
    assert overlap((2.0, 3.5), merged) == 1.0
    assert overlap((2.5, 3.0), merged) == 0.0
    assert overlap((-1.0, 9.0), merged) == 3.5


def test_requests_and_traces_in_a_runs_folder(tmp_path: Path) -> None:
    assert take_request(tmp_path) is None
    write_request(tmp_path, ProfileRequest(steps=3, first_rank=1, last_rank=2))
    assert take_request(tmp_path) == ProfileRequest(steps=3, first_rank=1, last_rank=2)
    assert not request_file(tmp_path).exists()
    request_file(tmp_path).write_text('{"steps": 0}', encoding="utf-8")
    with pytest.raises(ValueError, match="steps"):
        take_request(tmp_path)
    assert not request_file(tmp_path).exists()  # a damaged request does not come back each second
    for name in ("steps-10-12/rank-10.json.gz", "steps-10-12/rank-9.json.gz", "steps-2-3/rank-0.json.gz", "steps-x/r"):
        (tmp_path / "profile" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "profile" / name).touch()
    assert [(each, rank) for each, rank, _ in traces(tmp_path)] == [((2, 3), 0), ((10, 12), 9), ((10, 12), 10)]

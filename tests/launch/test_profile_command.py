"""``partool profile``: what it asks of a running run, what it shows, and what it refuses."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from launch_helpers import make_plan
from typer.testing import CliRunner, Result

from partool.cli import profile
from partool.launch.store import Run, RunStore
from partool.plan.profiling import ProfileRequest, folder_of, request_file, take_request, trace_file
from partool.plan.run import RunStatus, write_status

STEP = {"ph": "X", "name": "partool step 7", "cat": "user_annotation", "ts": 1e6, "dur": 4e4, "pid": 1, "tid": 1}
WORK = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1.01e6, "dur": 1e4, "pid": 1, "tid": 1}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", "home")


def a_run(state: str, **launch: Any) -> Run:
    """Return a run whose agent is this very process."""
    run = RunStore().create("dummy")
    run.write_plan(make_plan(2, **launch), "spec: 1\n")
    status = run.status()
    ended = {"ended": 2.0, "exit_code": 0} if state == "done" else {}
    write_status(run.path, RunStatus(**{**status.model_dump(), "state": state, "attempt": 1, **ended}))
    return run


def invoke(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(profile.command)
    return CliRunner().invoke(app, arguments)


def trace(run: Run, rank: int) -> None:
    file = trace_file(folder_of(run.path, 7, 7), rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": [STEP, WORK]}).encode()))


@pytest.mark.timeout(60)
def test_a_running_run_is_asked_and_its_traces_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_S", 0.02)
    run = a_run("running")
    asked: list[ProfileRequest] = []

    def ranks() -> None:
        while not asked:
            time.sleep(0.01)
            asked.extend(filter(None, [take_request(run.path)]))
        trace(run, 0)
        time.sleep(0.1)
        trace(run, 1)

    thread = threading.Thread(target=ranks)
    thread.start()
    answer = invoke("dummy", "--steps", "1", "--ranks", "0-1")
    thread.join()
    assert answer.exit_code == 0, answer.stderr
    assert asked == [ProfileRequest(steps=1, first_rank=0, last_rank=1)]
    assert f"{run.id}, rank 0" in answer.stdout
    assert f"{run.id}, rank 1" in answer.stdout  # it waited for the later trace
    assert "75% of the step" in " ".join(answer.stdout.split())
    shown = json.loads(invoke("dummy", "--show", "--output", "json").stdout)
    assert shown["run"] == run.id
    assert [each["idle_s"] for each in shown["ranks"].values()] == pytest.approx([0.03, 0.03])


@pytest.mark.timeout(60)
def test_a_run_that_does_not_answer_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_S", 0.02)
    run = a_run("running")
    silent = invoke("dummy", "--timeout", "1")
    assert silent.exit_code == 1
    assert "PT636" in silent.stderr
    assert "has written no profile for 1 s" in silent.stderr
    monkeypatch.setattr(profile, "_ask", lambda *_: write_status(run.path, ended))
    ended = RunStatus(**{**run.status().model_dump(), "state": "done", "ended": 2.0, "exit_code": 0})
    request_file(run.path).touch()
    over = invoke("dummy")
    assert "ended before its ranks had written a profile" in over.stderr
    assert not request_file(run.path).exists()  # a resumed run is not profiled by surprise


@pytest.mark.parametrize(
    ("state", "arguments", "text"),
    [
        ("done", (), "does not train now (done)"),
        ("done", ("--show",), "has no profile"),
        ("running", ("--ranks", "2"), "--ranks 2: the run has ranks 0 to 1"),
        ("running", ("--ranks", "1-0"), "--ranks 1-0: "),
        ("running", ("--ranks", "all"), "--ranks 0, or --ranks 0-1"),
        ("running", ("--memory",), "--memory is for GPUs"),
    ],
)
def test_refusals(state: str, arguments: tuple[str, ...], text: str) -> None:
    run = a_run(state)
    answer = invoke("dummy", *arguments)
    assert answer.exit_code in (1, 2)
    assert text in answer.stderr
    assert not request_file(run.path).exists()


def test_a_damaged_trace_is_named() -> None:
    run = a_run("done")
    trace(run, 0)
    trace_file(folder_of(run.path, 7, 7), 0).write_bytes(b"no gzip")
    answer = invoke("dummy", "--show")
    assert answer.exit_code == 1
    assert "PT586" in answer.stderr
    assert "rank-0.json.gz" in answer.stderr

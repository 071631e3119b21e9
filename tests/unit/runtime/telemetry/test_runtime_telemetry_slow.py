"""A run that is slower than its plan says so once, with the likely reason: the machine, or one term."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from _telemetry import prediction, small_plan
from rich.console import Console

from partool.plan.event_log import event_log, read_events
from partool.report.curves import read_history
from partool.report.headline import headline
from partool.report.run import read_summary, render_run
from partool_runtime.telemetry import Recorder
from partool_runtime.telemetry._console import ConsoleLines
from partool_runtime.telemetry._slow import Busy, SlowWatch, slower, waited_s

QUIET = Busy(waited_s=0.0, load=1.0, cores=8, run_threads=1)
PLANNED = prediction()  # 0.08 s + 20 %: up to 0.128 s is as planned


def test_three_printed_errors_are_as_planned_and_more_is_not() -> None:
    assert slower(PLANNED, {"total": 0.127, "forward": 0.127}, QUIET) == ""
    assert slower(PLANNED, {}, QUIET) == ""
    said = slower(PLANNED, {"total": 0.16, "forward": 0.03, "backward": 0.08, "data": 0.01}, QUIET)
    assert said == (
        "steps take 160 ms, 2.0 times the predicted 80.0 ms + 20%: "
        "backward is off the most, 80.0 ms for 10.0 ms (partool explain backward)"
    )
    assert slower(PLANNED, {"total": 0.5, "forward": 0.01}, QUIET).endswith("outside the measured terms")


@pytest.mark.parametrize(
    ("busy", "reason"),
    [
        (Busy(0.1, 9.0, 2, 1), "contended, a thread waits 100 ms of each for a core (load 9.0 on 2 cores, 1 of it"),
        (Busy(0.1, None, 2, 1), "contended, a thread waits 100 ms of each for a core"),
        (Busy(0.001, 9.0, 2, 1), "backward is off the most"),  # other processes wait, this run does not
        (Busy(None, 9.0, 2, 1), "contended (load 9.0 on 2 cores, 1 of it this run's)"),
        (Busy(None, 2.0, 2, 2), "backward is off the most"),  # the load is caused by the run itself
        (Busy(None, None, 2, 2), "backward is off the most"),
    ],
)
def test_a_contended_machine_is_the_reason_where_threads_wait_for_cores(busy: Busy, reason: str) -> None:
    assert reason in slower(PLANNED, {"total": 0.2, "backward": 0.2}, busy)


def test_waiting_counts_from_the_first_steady_step_and_per_step() -> None:
    waits = iter([{"1": 100.0, "2": 3.0}, {"1": 100.5, "2": 3.0, "3": 0.1}])
    watch = SlowWatch(small_plan(), lambda: next(waits))
    for _ in range(6):
        watch.count()
    assert "a thread waits 100 ms of each for a core" in watch.look({"total": 0.28})  # 0.5 s, 5 steps
    assert watch.look({"total": 99.0}) == ""


def test_waiting_is_read_where_the_kernel_tells_it() -> None:
    found = waited_s()
    assert found is None or found
    assert all(value >= 0.0 for value in (found or {}).values())


def test_it_is_said_once_on_the_console_in_events_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partool_runtime.telemetry._slow.waited_s", dict)
    now, out, plan = [0.0], io.StringIO(), small_plan(steps=30)
    display = ConsoleLines(30, Console(file=out, width=200))
    recorder = Recorder(
        plan, tmp_path, rank=0, world_size=1, device=torch.device("cpu"), now=lambda: now[0], display=display
    )
    for step in range(1, 31):
        with recorder.timer("backward"):
            now[0] += 0.4
        recorder.step(step, 1.0)
        if step == 6:
            assert "warning" not in out.getvalue()  # too few steady steps
    recorder.close()
    said = "steps take 400 ms, 5.0 times the predicted 80.0 ms + 20%: backward is off the most"
    assert out.getvalue().count("warning: steps take") == 1
    events = [event["data"]["message"] for event in read_events(event_log(tmp_path, 0)) if event["kind"] == "warning"]
    assert [message.startswith(said) for message in events] == [True]
    assert json.loads((tmp_path / "summary.json").read_text())["slow"] == events[0]
    shown = io.StringIO()
    head = headline(plan, read_history(tmp_path), None)
    render_run("small-1", read_summary(tmp_path), None, "none", Console(file=shown, width=200), head=head)
    assert shown.getvalue().count(f"Slower than planned: {said}") == 1


def test_a_short_run_says_it_at_its_end_and_one_as_planned_says_nothing(tmp_path: Path) -> None:
    for name, step_s, count in (("slow", 0.4, 1), ("planned", 0.09, 0)):
        now, out, plan = [0.0], io.StringIO(), small_plan(steps=5, log_every=50)
        with Recorder(
            plan,
            tmp_path / name,
            rank=0,
            world_size=1,
            device=torch.device("cpu"),
            now=lambda now=now: now[0],  # type: ignore[misc]
            display=ConsoleLines(5, Console(file=out, width=200)),
        ) as recorder:
            for step in range(1, 6):
                now[0] += step_s
                recorder.step(step, 1.0)
        assert out.getvalue().count("warning: steps take") == count

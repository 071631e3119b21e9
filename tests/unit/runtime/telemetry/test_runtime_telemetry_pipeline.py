"""Executed actions written to the event log and read back: columns, waits, the steps that are written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from _telemetry import small_plan
from hypothesis import given
from hypothesis import strategies as st
from layouts import laid
from rich.console import Console

from partool.plan.event_log import event_log, read_events
from partool.plan.pipeline_log import Executed, pipeline_data, read_pipeline
from partool.schedule import Action
from partool_runtime.telemetry import Recorder
from partool_runtime.telemetry._console import ConsoleLines
from partool_runtime.telemetry.summary import MeasuredValue, Measures, combine

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "SEND_FW", "RECV_BW", "SEND_G")
MICROSECONDS = st.integers(0, 10**9).map(lambda us: us / 1e6)
EXECUTED = st.builds(
    Executed,
    st.builds(Action, st.sampled_from(KINDS), st.integers(0, 70), st.integers(0, 2000)),
    MICROSECONDS,
    MICROSECONDS,
    st.just(0.0),
)


@given(st.lists(EXECUTED, min_size=1, max_size=30))
def test_what_is_written_is_read_in_order_of_begin(done: list[Executed]) -> None:
    data = json.loads(json.dumps(pipeline_data(7, True, 1e9, done)))
    read = read_pipeline(data)
    zero_s = min(one.start_s for one in done)
    assert (read.step, read.steady, read.unix_s) == (7, True, pytest.approx(1e9 + zero_s, abs=1e-6))
    ordered = sorted(done, key=lambda one: one.start_s)
    assert [one.action for one in read.actions] == [one.action for one in ordered]
    for one, was in zip(read.actions, ordered, strict=True):
        assert one.start_s == pytest.approx(was.start_s - zero_s, abs=2e-6)
        assert one.stop_s == pytest.approx(was.stop_s - zero_s, abs=2e-6)


def test_time_0_is_before_the_first_wait() -> None:
    data = pipeline_data(1, False, 100.0, [Executed(Action("F", 1, 0), 5.5, 6.0, 0.5)])
    assert (data["t"], data["start_us"], data["stop_us"], data["waited_us"]) == (
        105.0,
        [500_000],
        [1_000_000],
        [500_000],
    )


@pytest.mark.parametrize("change", [{"actions": ["nonsense"]}, {"actions": []}, {"t": None}, {"stop_us": 3}])
def test_other_data_are_refused(change: dict[str, Any]) -> None:
    good = pipeline_data(1, False, 100.0, [Executed(Action("F", 1, 0), 5.5, 6.0, 0.5)])
    assert read_pipeline(good).actions
    with pytest.raises(ValueError, match="not the data of a pipeline event"):
        read_pipeline(good | change)
    with pytest.raises(ValueError, match="not the data of a pipeline event"):
        read_pipeline({})


@dataclass
class Clock:
    now: float = 50.0

    def __call__(self) -> float:
        return self.now


def recorder(run_dir: Path, clock: Clock, **plan: Any) -> Recorder:
    made = small_plan(**plan)
    lines = ConsoleLines(made.training.steps, Console(file=StringIO()))
    return Recorder(made, run_dir, rank=0, world_size=1, device=torch.device("cpu"), now=clock, display=lines)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def work(clock: Clock, waited_s: float = 0.25) -> Iterator[Executed]:
    """Yield two micro-batches' actions: the rank waits before the backward pass of each."""
    for batch in range(2):
        clock.now += 1.0
        yield Executed(Action("F", 0, batch), clock.now - 1.0, clock.now, 0.0)
    for batch in range(2):
        clock.now += waited_s + 2.0
        yield Executed(Action("B", 0, batch), clock.now - 2.0, clock.now, waited_s)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [event["data"] for event in read_events(event_log(run_dir, 0)) if event["kind"] == "pipeline"]


def test_log_steps_are_written_and_waits_are_the_bubble(tmp_path: Path, clock: Clock) -> None:
    with recorder(tmp_path, clock, steps=6, log_every=3) as it:
        for step in range(1, 7):
            it.pipeline(list(work(clock, 0.25 * step)))
            it.step(step, 1.0)
        assert it.measures().time["pipeline_bubble"].value == 2 * 0.25 * 4.5  # steps 3 to 6
        assert it.measures().time["pipeline_bubble"].measure == "waits for other stages"
    events = logged(tmp_path)
    assert [(event["step"], event["steady"]) for event in events] == [(1, False), (3, True), (6, True)]
    assert events[0]["actions"] == ["0F0", "0F1", "0B0", "0B1"]
    assert events[1]["waited_us"] == [0, 0, 750_000, 750_000]
    assert abs(time.time() - events[2]["t"] - 4 - 4 - 2 * 1.5) < 60  # seconds on the fake clock: two passes and waits


def test_functions_are_called_on_log_steps_only(tmp_path: Path, clock: Clock) -> None:
    called = []

    def read(step: int, done: list[Executed]) -> list[Executed]:
        called.append(step)
        return done

    with recorder(tmp_path, clock, steps=6, log_every=3) as it:
        for step in range(1, 7):
            done = list(work(clock, 0.25 * step))
            it.pipeline(lambda step=step, done=done: read(step, done))
            it.step(step, 1.0)
        assert it.measures().time["pipeline_bubble"].value == 2 * 0.25 * 4.5  # steps 3 and 6
    assert called == [1, 3, 6]
    assert len(logged(tmp_path)) == 3


def test_long_steps_are_written_less_often_but_the_last_one_always(tmp_path: Path, clock: Clock) -> None:
    layout = laid(small_plan().layout, accumulation=900)  # 5400 actions: every third log step
    with recorder(tmp_path, clock, steps=11, log_every=2, layout=layout) as it:
        for step in range(1, 12):
            it.pipeline(list(work(clock)))
            it.step(step, 1.0)
    assert [event["step"] for event in logged(tmp_path)] == [1, 6, 11]


def test_a_step_without_actions_writes_none(tmp_path: Path, clock: Clock) -> None:
    with recorder(tmp_path, clock, steps=2, log_every=1) as it:
        it.pipeline(list(work(clock)))
        it.step(1, 1.0)
        it.step(2, 1.0)
    assert [event["step"] for event in logged(tmp_path)] == [1]


def test_the_most_that_micro_batches_keep_at_once_is_measured(tmp_path: Path, clock: Clock) -> None:
    layout = small_plan().layout
    deep = layout.changed({"pipeline.stages": 2})
    weight = torch.nn.Parameter(torch.randn(5, 3))
    for name, chosen, kept in (("pipeline", deep, 3), ("plain", layout, 1)):
        with recorder(tmp_path / name, clock, layout=chosen) as it:
            for step in range(1, 4):
                losses = []
                for batch in range(4):
                    with it.timer("forward"):
                        losses.append(torch.tanh(torch.randn(7, 3) @ weight.t()).sum())
                    if batch >= 2:  # three are in flight, then one arrives for each that leaves
                        with it.timer("backward"):
                            losses.pop(0).backward()
                for loss in losses:
                    with it.timer("backward"):
                        loss.backward()
                it.step(step, 1.0)
            assert it.measures().memory["activations"].value == kept * (7 * 3 + 7 * 5) * 4


def test_what_was_sent_is_the_traffic_of_the_latest_step(tmp_path: Path, clock: Clock) -> None:
    with recorder(tmp_path, clock, steps=2, log_every=1) as it:
        it.pipeline(list(work(clock)))
        assert "pipeline" not in it.measures().traffic
        it.pipeline(list(work(clock)), 4096)
        assert it.measures().traffic["pipeline"].value == 4096


def test_a_rank_that_computes_longest_stands_for_a_pipelines_times() -> None:
    def rank(forward: float, backward: float, bubble: float, memory: float) -> Measures:
        times = {"forward": forward, "backward": backward, "pipeline_bubble": bubble}
        return Measures({"total": MeasuredValue(memory, "x")}, {k: MeasuredValue(v, "x") for k, v in times.items()})

    ranks = [rank(1, 2, 9, 70), rank(4, 5, 3, 50), rank(2, 3, 5, 60)]
    combined = combine(ranks, busiest=True)
    assert {term: m.value for term, m in combined.time.items()} == {"forward": 4, "backward": 5, "pipeline_bubble": 3}
    assert combined.memory["total"].value == 70
    assert {term: m.value for term, m in combine(ranks).time.items()} == {
        "forward": 2, "backward": 3, "pipeline_bubble": 5,
    }  # fmt: skip

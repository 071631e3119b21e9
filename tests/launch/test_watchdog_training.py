"""The watchdog beside the real trainer: what is slow goes on, and what is stopped for good is restarted in time."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import processes_of, rank_pid, trainable_plan, wait_until
from layouts import laid
from patience import PATIENCE

from partool.plan.run import ERRORS, agent_command, agent_log, read_status
from partool.plan.types import Plan
from partool.spec.training import CheckpointSpec
from partool_runtime.agent.stacks import process_state
from partool_runtime.agent.watchdog import SLACK_S, STOPPED, STOPPED_STEPS

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 200
PREDICTED_S = 0.01
"""Step time of the plan, below the real one, so that limits follow the steps that are measured."""
STALL_STEPS, LEAST_STALL_S = 5.0, 1.5
"""Length of a stall in median steps, and its least seconds: the agent reads a process's state after a second."""
RANKS = ((0,), (1,), (0, 1))
"""Ranks that stall together, in turn."""


class Training:
    """A run of two real ranks whose blocks are compiled, with a checkpoint every 20 steps."""

    def __init__(self, folder: Path, *, compile: str) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        text = folder / "text.txt"
        text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
        self.plan = _plan(text, compile)
        (self.run_dir / "plan.json").write_text(self.plan.to_json())
        command = agent_command(sys.executable, self.run_dir / "plan.json", self.run_dir, resume=False)
        with (folder / "agent.txt").open("wb") as output:
            self.agent = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def steps_s(self, attempt: int = 1) -> list[float]:
        """Return the times at which steps of an attempt ended, in seconds, by rank 0's events."""
        try:
            lines = (self.run_dir / "events" / "rank-0.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        ends, current = list[float](), 0
        for event in map(json.loads, lines):
            if event["kind"] == "start":
                current = event["data"]["attempt"]
            if event["kind"] == "step" and current == attempt:
                ends.append(event["t"])
        return ends

    def median_s(self) -> float:
        """Return the median of the last steps' times."""
        ends = self.steps_s()[-20:]
        return statistics.median(then - first for first, then in itertools.pairwise(ends))

    def wait_for_step(self, step: int) -> None:
        """Wait until the first attempt has done a step, or has ended."""
        wait_until(lambda: len(self.steps_s()) >= step or self.agent.poll() is not None, f"step {step}", 120)

    def stall(self, ranks: tuple[int, ...], seconds: float) -> None:
        """Stop the processes of ranks for some seconds."""
        pids = [rank_pid(self.run_dir, rank) for rank in ranks]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        assert [process_state(pid) for pid in pids] == [STOPPED] * len(pids)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def finish(self) -> int:
        """Wait for the agent and return its exit code."""
        try:
            return self.agent.wait(120 * PATIENCE)
        finally:
            self.agent.kill()


def _plan(text: Path, compile: str) -> Plan:
    plan = trainable_plan(text, STEPS, restarts=1)
    time_ = plan.prediction.time.model_copy(update={"step_time_s": PREDICTED_S})
    return plan.model_copy(
        update={
            "prediction": plan.prediction.model_copy(update={"time": time_}),
            "checkpoint": CheckpointSpec(every=20, keep=2),
            "layout": laid(plan.layout, compile=compile),
        }
    )


def test_stalls_compilation_and_saves_cause_no_restart(tmp_path: Path) -> None:
    """200 steps with 12 stalls of five median steps or more, compiled blocks and ten checkpoints."""
    training = Training(tmp_path, compile="block")
    stalled_s = []
    for step, ranks in zip(range(15, 195, 15), itertools.cycle(RANKS), strict=False):
        training.wait_for_step(step)
        stalled_s.append(max(LEAST_STALL_S, STALL_STEPS * training.median_s()))
        training.stall(ranks, stalled_s[-1])
    assert training.finish() == 0
    assert read_status(training.run_dir).state == "done"
    assert read_status(training.run_dir).attempt == 1
    assert len(training.steps_s()) == STEPS
    steps_s = sorted(then - first for first, then in itertools.pairwise(training.steps_s()))
    longest_s = steps_s[-len(stalled_s) :]
    assert all(step_s > stall_s / 2 for step_s, stall_s in zip(longest_s, sorted(stalled_s), strict=True))
    assert not (training.run_dir / ERRORS).exists()
    assert processes_of(training.run_dir) == []


def test_a_rank_that_is_stopped_for_good_is_restarted_in_time(tmp_path: Path) -> None:
    """Within three upper bars of a step and a minute; the run goes on from its checkpoint and ends."""
    training = Training(tmp_path, compile="none")
    training.wait_for_step(50)
    os.kill(rank_pid(training.run_dir, 1), signal.SIGSTOP)
    log = agent_log(training.run_dir, 2)
    wait_until(lambda: log.exists() or training.agent.poll() is not None, "the restart", 2 * SLACK_S)
    steps_s = [then - first for first, then in itertools.pairwise(training.steps_s())]
    assert training.finish() == 0
    idle = re.search(r"PT556: rank 1 made no progress for (\d+) s, .* its process is stopped", log.read_text())
    assert idle is not None
    bar_s = max(training.plan.prediction.upper_step_s, *steps_s)
    assert SLACK_S <= float(idle[1]) <= STOPPED_STEPS * bar_s + SLACK_S + PATIENCE
    assert {file.name for file in (training.run_dir / ERRORS / "attempt-1").iterdir()} >= {
        "rank-0.stacks.txt",
        "rank-1.stacks.txt",
    }
    status = read_status(training.run_dir)
    assert (status.state, status.attempt) == ("done", 2)
    assert len(training.steps_s(2)) < STEPS, "the second attempt began from a checkpoint"
    assert processes_of(training.run_dir) == []

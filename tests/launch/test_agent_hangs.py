"""Ranks that stop or hang: in mid-run, after the last step, and on another node."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from launch_helpers import AgentRun, make_plan, wait_until
from often import often
from processes import is_running

from partool.plan.progress import read_progress
from partool.plan.run import ERRORS, agent_log
from partool.spec.launch import NotifySpec

pytestmark = pytest.mark.timeout(120)
QUICK = {"watchdog": 3}
TAKE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
"""Program that appends what it reads to a file."""


def stacks(run: AgentRun, rank: int, attempt: int = 1) -> str:
    """Return what the agent wrote about a stalled rank."""
    return (run.run_dir / ERRORS / f"attempt-{attempt}" / f"rank-{rank}.stacks.txt").read_text()


def test_a_stopped_rank_is_named_and_restarted(tmp_path: Path) -> None:
    """The stopped rank is found, not the one that waits for it; stacks come before the restart, and people are told."""
    script = {"0": "wait", "1": "freeze", "0@2": "", "1@2": ""}
    notify = NotifySpec(command=[sys.executable, "-S", "-c", TAKE, str(tmp_path / "told")])
    run = AgentRun(tmp_path / "run", script, make_plan(restarts=1, notify=notify, **QUICK)).start()
    assert run.finish() == 0
    stall, end = (json.loads(line) for line in (tmp_path / "told").read_text().splitlines())
    assert (stall["event"], stall["attempt"], stall["state"]) == ("stall", 1, "running")
    assert stall["reason"].startswith("PT556: rank 1 made no progress for ")
    assert (end["event"], end["attempt"], end["state"], end["exit_code"]) == ("end", 2, "done", 0)
    assert run.status.attempt == 2
    said = agent_log(run.run_dir, 2).read_text()
    assert "PT556: rank 1 made no progress for " in said
    assert ", in training after step 2; its process is stopped (SIGSTOP); stacks of all ranks: " in said
    assert ": state T (stopped by a signal" in stacks(run, 1)
    assert "in _misbehave" in stacks(run, 1)
    assert "in _wait" in stacks(run, 0)
    progress = read_progress(run.run_dir)
    assert progress is not None
    assert progress.attempt == 2
    assert run.survivors() == []


@pytest.mark.long
def test_a_hung_rank_is_named_unless_nobody_watches(tmp_path: Path) -> None:
    """Without restarts the run fails; with ``watchdog: off`` it goes on until somebody ends it."""
    deaf = AgentRun(tmp_path / "deaf", {"0": "deaf", "1": "wait"}, make_plan(**QUICK)).start()
    off = AgentRun(tmp_path / "off", {"0": "wait", "1": "freeze"}, make_plan(watchdog="off")).start()
    assert deaf.finish() == 1
    assert deaf.status.reason.startswith("PT556: rank 0 made no progress for ")
    assert f"stacks of all ranks: {deaf.run_dir / ERRORS / 'attempt-1'}" in deaf.errors
    assert "in _wait" in stacks(deaf, 0)
    assert "SIGSTOP" not in deaf.errors
    assert deaf.survivors() == []

    off.wait_for("steps-0", "steps-1")  # the other run's watchdog has ended it meanwhile
    assert off.status.state == "running"
    assert off.process is not None
    off.process.send_signal(signal.SIGINT)
    off.process.send_signal(signal.SIGINT)
    assert off.finish() == 1
    assert off.survivors() == []


@pytest.mark.parametrize(("saved", "cancelled"), often([(True, False), (False, False), (True, True)], [(True, False)]))
def test_a_rank_that_does_not_end_after_the_last_step(tmp_path: Path, saved: bool, cancelled: bool) -> None:
    """The run is done if the last step is saved, even if it is cancelled meanwhile; otherwise it has failed."""
    run = AgentRun(tmp_path, {"1": "late"}, make_plan(shutdown_timeout_s=1))
    if saved:
        (tmp_path / "checkpoints" / f"step-{make_plan().training.steps:08}").mkdir(parents=True)
    run.start(finish_s=600 if cancelled else 1)
    if cancelled:
        pid = run.rank_start(0)["pid"]
        wait_until(lambda: not is_running(pid), "the end of rank 0")
        assert run.process is not None
        run.process.terminate()
    assert run.finish() == (0 if saved else 1)
    assert run.survivors() == []
    if saved:
        assert run.status.state == "done"
        assert run.status.reason == "rank 1 did not end after the last step and had to be killed"
        assert "the last step is saved" in run.errors
    else:
        assert run.status.reason.startswith("rank 1 killed: not ended 1 s after the first rank had finished")
        assert run.status.reason.endswith("the last step was not saved")

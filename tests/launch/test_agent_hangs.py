"""Ranks that stop or hang: in mid-run, after the last step, and on another node."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launch_helpers import AgentRun, make_plan, wait_until

from partool.plan.progress import read_progress
from partool.plan.run import ERRORS, agent_log

pytestmark = pytest.mark.timeout(120)
QUICK = {"watchdog": 3}


def stacks(run: AgentRun, rank: int, attempt: int = 1) -> str:
    """Return what the agent wrote about a stalled rank."""
    return (run.run_dir / ERRORS / f"attempt-{attempt}" / f"rank-{rank}.stacks.txt").read_text()


def test_a_rank_without_progress_is_named_and_restarted(tmp_path: Path) -> None:
    """A stopped rank is found, not the one that waits for it, and all stacks are written before the restart."""
    frozen = {"0": "wait", "1": "freeze", "0@2": "", "1@2": ""}
    again = AgentRun(tmp_path / "again", frozen, make_plan(restarts=1, **QUICK)).start()
    deaf = AgentRun(tmp_path / "deaf", {"0": "deaf", "1": "wait"}, make_plan(**QUICK)).start()
    off = AgentRun(tmp_path / "off", {"0": "wait", "1": "freeze"}, make_plan(watchdog="off")).start()

    assert again.finish() == 0
    assert again.status.attempt == 2
    named = "PT556: rank 1 made no progress for "
    assert named in agent_log(again.run_dir, 2).read_text()
    assert ", in training after step 2; its process is stopped (SIGSTOP)" in again.errors
    assert ": state T (stopped by a signal" in stacks(again, 1)
    assert "dummy_job.py" in stacks(again, 1)
    assert "in _misbehave" in stacks(again, 1)
    assert "in _wait" in stacks(again, 0)
    progress = read_progress(again.run_dir)
    assert progress is not None
    assert progress.attempt == 2

    assert deaf.finish() == 1
    assert deaf.status.reason.startswith("PT556: rank 0 made no progress for ")
    assert f"stacks of all ranks: {deaf.run_dir / ERRORS / 'attempt-1'}" in deaf.errors
    assert "in _wait" in stacks(deaf, 0)
    assert "SIGSTOP" not in deaf.errors
    assert deaf.survivors() == []

    off.wait_for("steps-0", "steps-1")  # others have ended by the watchdog meanwhile
    assert off.status.state == "running"
    assert off.process is not None
    off.process.send_signal(signal.SIGINT)
    off.process.send_signal(signal.SIGINT)
    assert off.finish() == 1
    assert off.survivors() == []


def test_a_rank_that_does_not_end_after_the_last_step(tmp_path: Path) -> None:
    """The run is done if the last step is saved, even if it is cancelled meanwhile; otherwise it has failed."""
    last = make_plan().training.steps
    plan = make_plan(shutdown_timeout_s=1)
    script = {"1": "late"}
    done, failed, cancelled = (AgentRun(tmp_path / name, script, plan) for name in ("done", "failed", "cancelled"))
    for run in (done, cancelled):
        (run.run_dir / "checkpoints" / f"step-{last:08}").mkdir(parents=True)
    done.start(finish_s=1)
    failed.start(finish_s=1)
    cancelled.start(finish_s=600)
    for run in (done, cancelled):
        if run is cancelled:
            pid = run.rank_start(0)["pid"]
            wait_until(lambda pid=pid: not _runs(pid), "the end of rank 0")  # type: ignore[misc]
            assert run.process is not None
            run.process.terminate()
        assert run.finish() == 0
        assert run.status.state == "done"
        assert run.status.reason == "rank 1 did not end after the last step and had to be killed"
        assert "the last step is saved" in run.errors
        assert run.survivors() == []
    assert failed.finish() == 1
    assert failed.status.reason.startswith("rank 1 killed: not ended 1 s after the first rank had finished")
    assert failed.status.reason.endswith("the last step was not saved")
    assert failed.survivors() == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

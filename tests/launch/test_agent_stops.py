"""Stop requests within steps that end in the time that the plan gives them, or do not."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from launch_helpers import AgentRun, make_plan, wait_until

from partool.plan.event_log import event_log

pytestmark = pytest.mark.timeout(120)
LONG = {"0": "long", "1": "long"}


def stopped(run: AgentRun, *files: str) -> AgentRun:
    """Send SIGINT to a run that was started, once these files exist."""
    run.wait_for(*files)
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    return run


def test_a_stop_within_a_long_step(tmp_path: Path) -> None:
    """The step takes 4 s: a written second loses it, and keeps the checkpoint before it; the plan's time saves it."""
    bare = AgentRun(tmp_path / "bare", {"0": "hang", "1": "hang"}, make_plan(shutdown_timeout_s=1)).start()
    short = AgentRun(tmp_path / "short", LONG, make_plan(shutdown_timeout_s=1))
    roomy = AgentRun(tmp_path / "roomy", LONG)
    log = event_log(short.run_dir, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    steps = "".join(f'{{"v": 1, "kind": "step", "t": 1.0, "rank": 0, "data": {{"step": {n}}}}}\n' for n in (1, 9))
    log.write_text(steps)
    for run in (short, roomy):  # one by one, so that each is stopped as soon as both of its ranks are in the long step
        run.start().wait_for("steps-0", "steps-1", "checkpoints/step-00000003")
        files = [run.run_dir / f"steps-{rank}" for rank in (0, 1)]
        wait_until(lambda files=files: [file.read_text() for file in files] == ["3", "3"], "the long step")  # type: ignore[misc]
        stopped(run)
    stopped(bare, "steps-0", "steps-1")

    assert short.finish() == 75  # the run can go on
    said = "partool: SIGINT: up to 1 s for the step to end and its checkpoint; a second Ctrl-C ends it at once\n"
    assert short.errors.startswith(f"{said}partool: stopped by SIGINT, no checkpoint within 1 s of the stop signal\n")
    assert "  kept: the checkpoint of step 3\n" in short.errors
    assert "  lost: what followed it, 6 steps and the one under way: " in short.errors
    assert "  help: partool launch --resume short goes on from step 3\n" in short.errors
    assert (short.status.state, short.status.exit_code) == ("preempted", 75)
    assert short.status.reason == "stopped by SIGINT, no checkpoint within 1 s of the stop signal"

    assert roomy.finish() == 75
    assert "up to 60 s for the step to end" in roomy.errors
    assert roomy.errors.endswith("partool: stopped by SIGINT, after a checkpoint\n")
    assert (roomy.run_dir / "checkpoint-0").read_text().startswith("4 ")
    assert "lost:" not in roomy.errors

    assert bare.finish() == 1  # nothing to go on from
    assert "ranks 0, 1 killed: no checkpoint within 1 s of the stop signal" in bare.errors
    assert "  lost: everything since the start, the step under way: " in bare.errors
    assert "a new start begins anew" in bare.errors
    assert bare.status.state == "failed"
    assert short.survivors() == roomy.survivors() == bare.survivors() == []


def test_a_second_interrupt_says_what_is_kept(tmp_path: Path) -> None:
    """A second Ctrl-C ends the run at once, and says what it cost."""
    run = stopped(AgentRun(tmp_path / "twice", LONG).start(), "checkpoints/step-00000003")
    assert run.process is not None
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 1
    assert "interrupted a second time" in run.errors
    assert "  kept: the checkpoint of step 3\n" in run.errors
    assert "  help: partool launch --resume twice goes on from step 3\n" in run.errors

"""What agents say and decide when ranks that were asked to stop have to be killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from _launch_case import launch_plan

from partool.plan.event_log import event_log
from partool_runtime.agent.failures import FailureLog
from partool_runtime.agent.node_messages import Outcome
from partool_runtime.agent.run import _window_s
from partool_runtime.agent.stops import left_without_checkpoint, losses, waiting
from partool_runtime.agent.supervision import Reaction, Supervision
from partool_runtime.agent.together import judged

LATE = "stopped by SIGTERM, no checkpoint within 60 s of the stop signal"


def killed_late(codes: dict[int, int | None]) -> Supervision:
    """Return the state after a stop whose time is over, with these exit codes at the end."""
    watch = Supervision(shutdown_timeout_s=60, signals=[signal.SIGTERM])
    running: dict[int, int | None] = dict.fromkeys(codes)
    assert watch.observe(running, 0) is Reaction.STOP
    assert watch.observe(running, 59.9) is Reaction.WAIT
    assert watch.observe(running, 60) is Reaction.KILL
    assert watch.observe(codes, 61) is Reaction.FINISH
    return watch


def test_a_late_stop_can_be_requeued_where_there_is_a_checkpoint() -> None:
    watch = killed_late({0: -9, 1: -9})
    assert (watch.overdue, watch.exit_code, watch.may_restart) == (True, 1, False)
    watch.resumable = True
    assert watch.exit_code == 75
    broken = killed_late({0: 1, 1: -9})  # this rank failed by itself
    broken.resumable = True
    assert broken.exit_code == 1
    watch.begin_attempt()
    assert (watch.resumable, watch.overdue) == (False, False)


def test_a_second_interrupt_is_no_stop_to_requeue() -> None:
    watch = Supervision(shutdown_timeout_s=60, signals=[signal.SIGINT, signal.SIGINT])
    assert watch.observe({0: None}, 0) is Reaction.KILL
    watch.resumable = True
    assert watch.observe({0: -9}, 1) is Reaction.FINISH
    assert (watch.overdue, watch.exit_code) == (False, 1)


def test_the_first_request_is_answered() -> None:
    text = waiting([signal.SIGINT], 330)
    assert text == "SIGINT: up to 330 s for the step to end and its checkpoint; a second Ctrl-C ends it at once"
    assert waiting([signal.SIGTERM], 60).endswith("; SIGINT (Ctrl-C) ends it at once")


@pytest.mark.parametrize(
    ("target", "name", "command"),
    [
        ("local", "run-1", "partool launch --resume run-1 goes on"),
        ("slurm", "task-3", "the scheduler's next start, or partool launch --resume array goes on"),
        ("torchrun", "run-1", "the same command on each node goes on"),
    ],
)
def test_what_is_kept_and_lost(tmp_path: Path, target: str, name: str, command: str) -> None:
    run_dir = tmp_path / "array" / name
    log = FailureLog(run_dir, launch_plan())
    begun = time.time() - 7300
    events = event_log(run_dir, 0)
    events.parent.mkdir(parents=True)
    events.write_text('{"v": 1, "kind": "step", "t": 1.0, "rank": 0, "data": {"step": 130}}\n')
    text = losses(log, target=target, run_dir=run_dir, since=begun)
    assert text.startswith(
        "  lost: everything since the start, 130 steps and the one under way: 2.0 h of training; no "
    )
    assert "shutdown_timeout_s: auto" in text
    saved = run_dir / "checkpoints" / "step-00000100"
    saved.mkdir(parents=True)
    os.utime(saved, (begun + 6700, begun + 6700))
    kept, lost, help = losses(log, target=target, run_dir=run_dir, since=begun).splitlines()
    assert kept == "  kept: the checkpoint of step 100"
    assert lost == "  lost: what followed it, 30 steps and the one under way: 10 min of training"
    assert help == f"  help: {command} from step 100"
    resumed = losses(log, target=target, run_dir=run_dir, since=time.time() - 200)
    assert "under way: 3 min of training" in resumed  # of this attempt; the checkpoint is of an earlier one
    assert losses(log, target=target, run_dir=run_dir, since=None).count("10 min") == 1


def test_nodes_agree_on_a_late_stop() -> None:
    late = Outcome(0, "a", 75, LATE, asked="SIGTERM", overdue=True)
    peer = Outcome(1, "b", 1, "rank 9: connection closed", lost_peer=True)  # it had lost the ranks that were killed
    verdict = judged([late, peer])
    assert verdict.code == 75
    assert verdict.reason == "stopped by SIGTERM to node 0 (a), no checkpoint within 60 s of the stop signal"
    assert "after a checkpoint" not in verdict.text
    assert judged([late, Outcome(1, "b", 1, "rank 9: ValueError")]).code == 1
    nothing_kept = Outcome(0, "a", 1, "rank 0 killed", asked="SIGTERM", overdue=True)
    assert judged([nothing_kept, peer]).code == 1
    assert judged([Outcome(0, "a", 75, "stopped", asked="SIGTERM"), peer]).code == 1


def test_the_lock_outlasts_the_stop_of_the_attempt_before(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert _window_s(file) == 60
    file.write_text("no plan")
    assert _window_s(file) == 60
    file.write_text(launch_plan(shutdown_timeout_s=900).to_json())
    assert _window_s(file) == 900


def test_nothing_is_lost_of_a_run_whose_last_step_is_saved() -> None:
    watch = killed_late({0: 0, 1: -9})
    assert left_without_checkpoint(watch)
    watch.complete = True
    assert not left_without_checkpoint(watch)

"""Signals to agent, ranks and terminal; and the remains of a run whose agent is gone."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import HERE, AgentRun, make_plan, ranks_environment, wait_until
from patience import PATIENCE

from partool.launch.local.target import LocalTarget
from partool.launch.store import Run, RunStore

pytestmark = pytest.mark.timeout(120)
FOLLOW = {"0": "follow", "1": "follow"}


def test_stop_signals(tmp_path: Path) -> None:
    """SIGTERM and SIGUSR2, to the agent or to one rank: every rank checkpoints, exit code 75; then a resume works."""
    names = {"agent-term": "SIGTERM", "agent-usr2": "SIGUSR2", "agent-hup": "SIGHUP"}
    ranks = {"agent-term": 2, "agent-usr2": 1, "agent-hup": 1}
    agents = {name: AgentRun(tmp_path / name, FOLLOW, make_plan(ranks[name])).start() for name in names}
    one_rank = AgentRun(tmp_path / "rank", {"0": "follow", "1": "signal:SIGUSR2"}, make_plan(restarts=1)).start()
    early = AgentRun(tmp_path / "early", FOLLOW).start(fresh=True)
    early.wait_for("status.json")
    assert early.process is not None
    early.process.terminate()  # long before a rank can handle anything
    slow = AgentRun(tmp_path / "slow", {"0": "slow"}, make_plan(1, shutdown_timeout_s=2)).start()
    quick = make_plan(shutdown_timeout_s=2)
    lingering = AgentRun(tmp_path / "lingering", {"0": "linger", "1": "follow"}, quick).start()
    slow.rank_start(0)
    assert slow.process is not None
    slow.process.terminate()

    for name, run in agents.items():
        run.wait_for(*(f"steps-{rank}" for rank in range(ranks[name])))
        assert run.process is not None
        run.process.send_signal(getattr(signal, names[name]))
    for name, run in agents.items():
        assert run.finish() == 75
        assert (run.status.state, run.status.exit_code) == ("preempted", 75)
        assert run.status.reason == f"stopped by {names[name]}"
        wanted = "SIGTERM" if name == "agent-hup" else names[name]
        saved = [(run.run_dir / f"checkpoint-{rank}").read_text() for rank in range(ranks[name])]
        assert all(text.endswith(wanted) for text in saved)

    assert one_rank.finish() == 75
    assert one_rank.status.attempt == 1
    assert one_rank.status.reason == "stopped by a signal to a rank"
    for run in (early, slow):  # nothing to save, so no wait
        assert run.finish() == 75
        assert (run.status.state, run.status.reason) == ("preempted", "stopped by SIGTERM")
        assert run.errors == "partool: stopped by SIGTERM, before the first step\n"
        assert not list(run.run_dir.glob("checkpoint*")) + list((run.run_dir / "errors").glob("*"))
        assert run.survivors() == []
    lingering.wait_for("steps-0", "steps-1")
    assert lingering.process is not None
    lingering.process.terminate()
    assert lingering.finish() == 75  # every finished step is saved
    assert (lingering.status.state, lingering.status.reason) == ("preempted", "stopped by SIGTERM")
    assert "after a checkpoint; rank 0 did not end and had to be killed" in lingering.errors

    again = AgentRun(tmp_path / "agent-term", {})
    (again.run_dir / "stopping").unlink()
    assert again.start(resume=True).finish() == 0
    assert again.status.attempt == 2
    assert again.rank_start(0, attempt=2)["resume"]


def test_agent_killed(tmp_path: Path) -> None:
    """SIGKILL to the agent also ends its ranks, at any time and even if one hangs, and the status says so."""
    run = AgentRun(tmp_path / "run", {"0": "follow", "1": "hang"}).start()
    young = AgentRun(tmp_path / "young", FOLLOW).start(fresh=True)
    wait_until(lambda: len(young.survivors()) == 3, "the ranks' processes")
    assert young.process is not None
    young.process.kill()
    wait_until(lambda: young.survivors() == [], "the young ranks' end")
    young.finish()
    run.wait_for("steps-0", "steps-1")
    assert len(run.survivors()) == 3
    assert Run(run.run_dir).status().state == "running"
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    wait_until(lambda: run.survivors() == [], "the ranks' end")
    run.finish()
    assert run.status.state == "running"
    assert (Run(run.run_dir).status().state, Run(run.run_dir).status().reason) == ("failed", "agent gone")


def test_shutdown_timeout(tmp_path: Path) -> None:
    """A rank that does not stop is killed after the time allowed, and the run has failed."""
    run = AgentRun(tmp_path, {"0": "follow", "1": "hang"}, make_plan(shutdown_timeout_s=1, restarts=3)).start()
    run.wait_for("steps-0", "steps-1")
    assert run.process is not None
    run.process.terminate()
    assert run.finish() == 1
    assert "partool: rank 1 killed: no checkpoint within 1 s of the stop signal\n" in run.errors
    assert (run.status.state, run.status.attempt) == ("failed", 1)
    assert run.survivors() == []


def test_terminal(tmp_path: Path) -> None:
    """Under ``partool launch``: Ctrl-C once checkpoints; twice ends at once. Rank 0 has the terminal."""
    patient = _Terminal(AgentRun(tmp_path / "patient", FOLLOW))
    hasty = _Terminal(AgentRun(tmp_path / "hasty", {"0": "hang", "1": "hang"}))
    for terminal in (patient, hasty):
        terminal.run.wait_for("steps-0", "steps-1")
    patient.press_ctrl_c()
    hasty.press_ctrl_c()
    time.sleep(0.5)
    assert hasty.process.poll() is None
    assert hasty.run.status.state == "running"
    hasty.press_ctrl_c()
    assert patient.finish() == 75
    assert hasty.finish() == 1
    assert "interrupted a second time" in hasty.text
    assert "there is no checkpoint: a new start begins anew" in hasty.text
    assert "restarts: 1" not in hasty.text  # a run that the user ended must not restart by itself
    assert "Traceback" not in patient.text + hasty.text
    assert all((tmp_path / f"patient/checkpoint-{rank}").read_text().endswith("SIGINT") for rank in (0, 1))
    assert "rank 0 attempt 1 begins" in patient.text
    assert patient.run.survivors() == hasty.run.survivors() == []


def test_launcher_killed_and_detached(tmp_path: Path) -> None:
    """The run of a killed ``partool launch`` stops with a checkpoint; a detached one goes on until it is cancelled."""
    tied, detached = AgentRun(tmp_path / "tied", FOLLOW), AgentRun(tmp_path / "detached", FOLLOW)
    launcher = subprocess.Popen(_launch(tied), env=ranks_environment())
    try:
        assert (
            subprocess.run([*_launch(detached), "--detach"], env=ranks_environment(), timeout=30 * PATIENCE).returncode
            == 0
        )
        tied.wait_for("steps-0", "steps-1")
    finally:
        launcher.kill()
        launcher.wait()
    detached.wait_for("steps-0", "steps-1")
    target, run = LocalTarget(), Run(detached.run_dir)
    assert target.status(run).state == "running"
    assert target.cancel(run, now=False)
    for stopped in (tied, detached):
        wait_until(lambda stopped=stopped: stopped.status.state == "preempted", "the checkpoint")  # type: ignore[misc]
        wait_until(lambda stopped=stopped: stopped.survivors() == [], "the agent's end")  # type: ignore[misc]
    assert not target.cancel(run, now=False)


def _launch(run: AgentRun) -> list[str]:
    created = RunStore(run.run_dir / "home").create("first")  # any valid first status
    (created.path / "status.json").rename(run.run_dir / "status.json")
    return [sys.executable, str(HERE / "dummy_launch.py"), str(run.run_dir)]


class _Terminal:
    """A launcher with a terminal of its own."""

    def __init__(self, run: AgentRun) -> None:
        self.run = run
        self._keyboard, screen = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CONTROLLING_TERMINAL, *_launch(run)],
            env=ranks_environment(),
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)

    def press_ctrl_c(self) -> None:
        """Make the terminal send SIGINT to its foreground process group."""
        os.write(self._keyboard, b"\x03")

    def finish(self) -> int:
        """Wait for the end and return the text on the screen."""
        try:
            code = self.process.wait(timeout=30 * PATIENCE)
            while True:
                try:
                    self.text += os.read(self._keyboard, 1 << 16).decode()
                except OSError:  # EIO: every process has closed the terminal
                    return code
        finally:
            self.process.kill()
            os.close(self._keyboard)


_CONTROLLING_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

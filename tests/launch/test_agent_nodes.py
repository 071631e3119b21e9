"""Two nodes' agents with ranks of the dummy job end together. The runs of a test are concurrent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
from launch_helpers import (
    HERE,
    Agent,
    AgentRun,
    make_plan,
    processes_of,
    ranks_environment,
    start_agent,
    wait_until,
)
from patience import PATIENCE
from ports import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not typed as exported

from partool.plan.run import KEY_FILE
from partool.plan.types import Plan

pytestmark = pytest.mark.timeout(120)
HOST = socket.gethostname()
TIMING = {"beat_s": 0.1, "silent_s": 5.0, "notice_s": 1.0, "stranger_s": 4.0, "arrival_s": 60.0, "farewell_s": 5.0}


def plan_for_nodes(**launch: object) -> Plan:
    """Return a plan for two nodes with a rank each."""
    plan = make_plan(2, **launch)
    devices = plan.devices.model_copy(update={"nodes": 2, "per_node": 1})
    return plan.model_copy(update={"devices": devices})


class NodeRun(AgentRun):
    """A run on two nodes; ``agents`` by node rank."""

    def __init__(self, run_dir: Path, script: dict[str, str], plan: Plan | None = None) -> None:
        self.plan = plan or plan_for_nodes()
        super().__init__(run_dir, script, self.plan)
        self.texts: dict[int, tuple[str, str]] = {}
        self.agents: dict[int, Agent] = {}
        self.port = free_port()

    def start_nodes(self, *nodes: int, other_plan: Plan | None = None, fresh: bool = False, **timing: float) -> NodeRun:
        """Start the agents of these nodes; the last node may have a different plan; ``fresh`` ones load torch.

        ``timing`` replaces values of ``TIMING``.
        """
        for node in nodes or (1, 0):
            plan_file = self.run_dir / "plan.json"
            if other_plan is not None and node == 1:
                plan_file = self.run_dir / "other.json"
                plan_file.write_text(other_plan.to_json())
            self.agents[node] = start_agent(
                [
                    *(str(HERE / "dummy_agent.py"), str(plan_file), "--run-dir", str(self.run_dir)),
                    *("--nodes", "2", "--node-rank", str(node), "--rendezvous", f"127.0.0.1:{self.port}"),
                    *("--termination-log", str(self.run_dir / f"ended-{node}")),
                ],
                ranks_environment(PARTOOL_TEST_TIMING=json.dumps(TIMING | timing)),
                fresh=fresh,
            )
        return self

    def end(self, timeout_s: float = 60) -> list[int]:
        """Wait for the agents and return their exit codes by node rank."""
        try:
            for node, agent in self.agents.items():
                self.texts[node] = agent.communicate(timeout=timeout_s * PATIENCE)
        finally:
            for agent in self.agents.values():
                agent.kill()
        return [self.agents[node].returncode for node in sorted(self.agents)]

    def message(self, node: int) -> str:
        """Return an agent's standard error."""
        return self.texts[node][1]

    def termination(self, node: int) -> str:
        """Return an agent's termination message."""
        return (self.run_dir / f"ended-{node}").read_text()


def test_a_failure_ends_all_nodes_with_one_code(tmp_path: Path) -> None:
    """Exit codes, reasons and messages if a rank of one node fails, in ways that a retry does or does not fix."""
    failed = NodeRun(tmp_path / "failed", {"0": "follow", "1": "raise"}).start_nodes()
    wrong = NodeRun(tmp_path / "wrong", {"0": "follow", "1": "configuration"}).start_nodes()
    other_plan = plan_for_nodes(shutdown_timeout_s=7)
    refused = NodeRun(tmp_path / "refused", {}).start_nodes(other_plan=other_plan)
    unusable = NodeRun(tmp_path / "unusable", {}).start_nodes(other_plan=make_plan(2), stranger_s=4.0 * PATIENCE)

    assert failed.end() == [1, 1]
    status = failed.status
    reason = f"rank 1 on node 1 ({HOST}): ValueError: broken on purpose by rank 1"
    assert (status.state, status.exit_code, status.attempt, status.reason) == ("failed", 1, 1, reason)
    assert status.pid == failed.agents[0].pid
    headline = f"partool: rank 1 on node 1 ({HOST}) failed (attempt 1): ValueError: broken on purpose by rank 1"
    for node in (0, 1):
        assert headline + "\n  Traceback" in failed.message(node)
        assert failed.termination(node).startswith(headline)
    assert "rank 0 attempt 1 begins" in failed.texts[0][0]
    assert failed.texts[1][0] == ""
    (entry,) = map(json.loads, (failed.run_dir / "failures.jsonl").read_text().splitlines())
    assert entry["signature"] == "ValueError: broken on purpose by rank N"

    assert wrong.end() == [78, 78]
    assert wrong.status.reason == f"rank 1 on node 1 ({HOST}): PT699: the file is not there"

    assert refused.end() == [78, 78]
    assert all("PT580" in refused.message(node) for node in (0, 1))
    assert f"its plan is {other_plan.hash[:12]}, that of node 0 {refused.plan.hash[:12]}" in refused.status.reason

    assert unusable.end() == [78, 78]
    assert "PT582: the plan is for one node, --nodes is 2" in unusable.message(1)
    assert "PT582" in unusable.message(0)
    assert unusable.status.attempt == 0
    assert all(run.survivors() == [] for run in (failed, wrong, refused, unusable))


def write_into_the_store(port: int) -> None:
    """Write and delete keys in the torch store, as any process could; such writes must not end the run."""
    with contextlib.suppress(RuntimeError):
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
        store.add("partool/refusals", 0)
        store.set("partool/refusals/1", json.dumps(["PT580", "\x1b[2Jgo away", True]))
        store.add("partool/refusals", 1)
        store.delete_key("partool/state/1")
        store.set("partool/notice", "nothing")


def test_nodes_that_vanish_and_strangers(tmp_path: Path) -> None:
    """An agent that is killed or falls silent, and one that never joins, end the run; neither a foreign connection nor
    a suspension of the whole job does.
    """
    killed = NodeRun(tmp_path / "killed", {"0": "follow", "1": "follow"}).start_nodes()
    frozen = NodeRun(tmp_path / "frozen", {"0": "follow", "1": "follow"}).start_nodes()
    alone = NodeRun(tmp_path / "alone", {}).start_nodes(0)
    visited = NodeRun(tmp_path / "visited", {"0": "follow", "1": "follow"}).start_nodes(fresh=True)
    for run in (killed, frozen, visited):
        run.wait_for("steps-0", "steps-1")
    suspended = [pid for pid in processes_of(visited.run_dir) if pid != os.getpid()]
    assert len(suspended) == 4  # agents and ranks
    for pid in suspended:  # like scontrol suspend
        os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    killed.agents[1].kill()
    frozen.agents[0].send_signal(signal.SIGSTOP)
    try:
        assert killed.end() == [1, -signal.SIGKILL]
        assert killed.status.reason == (f"node 1 ({HOST}) vanished: its agent was killed, or the network to it is down")
        assert frozen.agents[1].wait(60 * PATIENCE) == 1
    finally:
        frozen.agents[0].kill()
        frozen.end()
    assert "node 0 (127.0.0.1) vanished" in frozen.message(1)
    for run in (killed, frozen):
        wait_until(lambda run=run: run.survivors() == [], "the ranks' end")  # type: ignore[misc]

    time.sleep(
        max(0.0, TIMING["silent_s"] + 2 - (time.monotonic() - begin))
    )  # longer than the allowed silence of a node
    for pid in suspended:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.0)
    assert [agent.poll() for agent in visited.agents.values()] == [None, None]
    write_into_the_store(visited.port)
    visited.agents[1].terminate()
    assert visited.end() == [75, 75]
    assert visited.status.reason == f"stopped by SIGTERM to node 1 ({HOST})"
    assert "refused a connection from 127.0.0.1" in visited.message(0)
    assert "\x1b" not in visited.message(0) + visited.message(1)
    key = (visited.run_dir / KEY_FILE).read_bytes().strip()
    assert (visited.run_dir / KEY_FILE).stat().st_mode & 0o777 == 0o600
    files = [file for file in visited.run_dir.rglob("*") if file.is_file() and file.name != KEY_FILE]
    assert not [file for file in files if key in file.read_bytes()]
    assert not any(key.decode() in text for texts in visited.texts.values() for text in texts)

    alone.agents[0].terminate()
    assert alone.end() == [75]
    assert alone.status.state == "preempted"
    assert "partool: waiting for node 1 of 2 (1 s)\n" in alone.message(0)


@pytest.mark.long
def test_a_rank_of_another_node_that_stops_is_named(tmp_path: Path) -> None:
    """Neither node names a rank that only waits, whichever agent finds it first, and both write stacks."""
    stopped = NodeRun(tmp_path / "stopped", {"0": "wait", "1": "freeze"}, plan_for_nodes(watchdog=4)).start_nodes()
    hung = NodeRun(tmp_path / "hung", {"0": "wait", "1": "deaf"}, plan_for_nodes(watchdog=4)).start_nodes()
    done = NodeRun(tmp_path / "done", {"1": "late"})
    (done.run_dir / "checkpoints" / f"step-{done.plan.training.steps:08}").mkdir(parents=True)
    done.start_nodes(finish_s=2.0)
    for run in (stopped, hung):
        assert run.end() == [1, 1]
        assert run.status.reason.startswith(f"PT556: rank 1 on node 1 ({HOST}) made no progress for ")
        for rank in (0, 1):
            text = (run.run_dir / "errors" / "attempt-1" / f"rank-{rank}.stacks.txt").read_text()
            assert "in _wait" in text or "in _misbehave" in text
    assert done.end() == [0, 0]
    assert done.status.state == "done"
    assert done.status.reason == f"rank 1 on node 1 ({HOST}) did not end after the last step and had to be killed"
    assert all(run.survivors() == [] for run in (stopped, hung, done))


@pytest.mark.long
def test_the_same_failure_is_not_tried_for_ever(tmp_path: Path) -> None:
    """Both restarts in place and restarts of the whole job by a scheduler are limited."""
    here = AgentRun(tmp_path / "here", {"1": "raise"}, make_plan(restarts=9, same_failure=2)).start()
    plan = plan_for_nodes(same_failure=2, restarts=9, target="slurm")
    nodes = NodeRun(tmp_path / "nodes", {"0": "raise"}, plan).start_nodes()
    assert nodes.end() == [1, 1]
    assert here.finish() == 78
    reason = "the same failure 2 times in a row: rank 1: ValueError: broken on purpose by rank 1"
    assert (here.status.attempt, here.status.reason) == (2, reason)
    assert f"partool: {reason}\n" in here.errors
    assert nodes.start_nodes().end() == [78, 78]
    assert nodes.status.attempt == 2
    assert nodes.status.reason.startswith("the same failure 2 times in a row: rank 0 on node 0")


@pytest.mark.long
def test_one_node_of_a_cluster_does_not_restart_in_place(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    plan = make_plan(1, target="slurm", restarts=5, secrets={"TOKEN": {"file": str(secret)}})
    run = AgentRun(tmp_path / "run", {"0": "exit:9"}, plan).start()
    gone = make_plan(1, secrets={"TOKEN": {"file": str(tmp_path / "missing")}})
    unreadable = AgentRun(tmp_path / "unreadable", {}, gone).start()
    assert run.finish() == 1
    assert run.status.attempt == 1
    assert run.rank_start(0)["env"]["TOKEN"] == "s3cret"
    assert unreadable.finish() == 78
    assert f"PT584: the secret TOKEN cannot be read from {tmp_path}/missing: No such file" in unreadable.errors
    assert not [
        file
        for file in run.run_dir.rglob("*")
        if file.is_file() and not file.name.startswith("start-") and b"s3cret" in file.read_bytes()
    ]
    assert processes_of(tmp_path) == []
    assert "TOKEN" not in os.environ

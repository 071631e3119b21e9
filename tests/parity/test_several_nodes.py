"""Agents of two nodes on this machine, with the real trainer: the same training as in one process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from _plans import small_plan, write_text
from patience import PATIENCE
from ports import free_port
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from partool.plan.run import agent_command, rank_command, read_status, starting_file
from partool.plan.types import Plan

NODES, STEPS = 2, 6
WORKER = "partool_runtime.worker"


class Run:
    """A run in a folder of its own, which all its agents see."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self.run_dir = run_dir
        self.plan = plan
        run_dir.mkdir()
        (run_dir / "plan.json").write_text(plan.to_json())

    def start(self) -> list[subprocess.Popen[str]]:
        """Start an agent per node."""
        port = free_port()
        return [self._agent(node, port) for node in range(NODES)]

    def start_alone(self) -> subprocess.Popen[str]:
        """Start a single rank, without an agent."""
        plan_file = self.run_dir / "plan.json"
        return _start(rank_command(plan_file, self.run_dir, resume=False, module=WORKER), os.environ)

    def _agent(self, node: int, port: int) -> subprocess.Popen[str]:
        command = agent_command(
            sys.executable,
            self.run_dir / "plan.json",
            self.run_dir,
            resume=True,
            plan_hash=self.plan.hash,
            nodes=NODES,
            node_rank=node,
            rendezvous=f"127.0.0.1:{port}",
            echo="all",
        )
        leftover = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9"}
        return _start(command, os.environ | leftover)

    def steps(self) -> dict[int, float]:
        """Return rank 0's losses by step."""
        lines = (self.run_dir / "events" / "rank-0.jsonl").read_text().splitlines()
        data = [event["data"] for event in map(json.loads, lines) if event["kind"] == "step"]
        assert len({step["step"] for step in data}) == len(data), "a step was repeated"
        return {step["step"]: step["loss"] for step in data}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the state of the last checkpoint."""
        whole = self.run_dir / "whole.pt"
        dcp_to_torch_save(self.run_dir / "checkpoints" / f"step-{STEPS:08d}", whole)
        return {name: tensor for name, tensor in torch.load(whole).items() if isinstance(tensor, torch.Tensor)}


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _finish(agents: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        ended = [agent.communicate(timeout=100 * PATIENCE) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, *texts) for agent, texts in zip(agents, ended, strict=True)]


def _plan_for(text: Path, nodes: int, per_node: int) -> Plan:
    plan = small_plan(
        text, ranks=nodes * per_node, zero=3 if nodes > 1 else 0, accumulation=1, precision="fp64", steps=STEPS
    )
    devices = plan.devices.model_copy(update={"nodes": nodes, "per_node": per_node})
    return plan.model_copy(update={"devices": devices})


@pytest.mark.timeout(170)
@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=pytest.mark.long)])
def test_two_nodes_equal_one_process(tmp_path: Path, per_node: int) -> None:
    """Stopped by a signal to one of the agents and resumed, two nodes train what one process trains."""
    text = tmp_path / "text"
    write_text(text)
    nodes = Run(tmp_path / "nodes", _plan_for(text, NODES, per_node))
    one = Run(tmp_path / "one", _plan_for(text, 1, 1))

    alone = one.start_alone()
    agents = nodes.start()
    first = starting_file(nodes.run_dir, 1, NODES * per_node - 1)
    end = time.monotonic() + 60 * PATIENCE
    for there in (True, False):  # the last rank has been started; it is about to end its first step
        while first.exists() is not there and time.monotonic() < end:
            time.sleep(0.002)
    agents[1].send_signal(signal.SIGTERM)
    stopped = _finish(agents)
    assert [code for code, _, _ in stopped] == [75, 75], stopped
    status = read_status(nodes.run_dir)
    assert (status.state, status.attempt, status.exit_code) == ("preempted", 1, 75)
    assert status.reason == f"stopped by SIGTERM to node 1 ({socket.gethostname()})"
    trained = len(nodes.steps())
    assert 1 <= trained < STEPS

    resumed = _finish(nodes.start())
    assert [(code, errors) for code, _, errors in resumed] == [(0, ""), (0, "")]
    assert [code for code, _, _ in _finish([alone])] == [0]
    assert (read_status(nodes.run_dir).state, read_status(nodes.run_dir).attempt) == ("done", 2)
    starts = json.loads((nodes.run_dir / "events" / "rank-0.jsonl").read_text().splitlines()[0])
    assert starts["data"]["world_size"] == NODES * per_node
    for node, (_, output, _) in enumerate(resumed):
        lines = output.splitlines()
        wanted = {f"[{node * per_node + local}]" for local in range(per_node)}
        assert {line.split()[0] for line in lines} <= wanted
    assert any(line.startswith("[0]") and "loss" in line for line in resumed[0][1].splitlines())

    want, got = one.steps(), nodes.steps()
    assert got.keys() == want.keys() == set(range(1, STEPS + 1))
    assert list(got.values()) == pytest.approx(list(want.values()), abs=1e-12)
    expected, weights = one.weights(), nodes.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((weights[name] - tensor).abs().max())
        assert difference <= 1e-12 * max(1.0, float(tensor.abs().max())), f"{name} differs by {difference}"
    assert any(float((weights[name] - tensor).abs().max()) > 0 for name, tensor in expected.items())

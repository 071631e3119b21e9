"""Training on two pods, from ``partool launch --follow`` over a killed rank and an evicted pod to its last step.

The API server is the tests' own, and a small stand-in for the JobSet controller and the kubelets runs the rendered
command with real agents and ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import k8s_schemas
import pytest
from k8s_case import Case, case, condition
from launch_helpers import processes_of, ranks_environment, trainable_plan, wait_until
from patience import PATIENCE
from ports import free_port
from test_kill_resume import losses
from test_launch_commands import invoke

from partool.launch.k8s import streams as k8s_streams
from partool.launch.store import Run
from partool.plan.types import Plan

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not k8s_schemas.custom_types(), reason=f"no definition of JobSet in {k8s_schemas.CRDS}"),
]
STEPS = 40
NODES = 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(k8s_streams, "PAUSE_S", 0.05)
    with case(tmp_path) as found:
        yield found


def plan_of(folder: Path) -> Plan:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    k8s = {"kind": "jobset", "storage": "pvc:runs"}
    plan = trainable_plan(text, STEPS, target="k8s", image="partool:1", restarts=1, k8s=k8s)
    devices = plan.devices.model_copy(update={"nodes": NODES, "per_node": 1})
    return plan.model_copy(update={"devices": devices, "checkpoint": plan.checkpoint.model_copy(update={"every": 5})})


class JobSet(threading.Thread):
    """Waits for a JobSet, and starts its pods together until they succeed or the allowed failures are used up."""

    def __init__(self, here: Case, folder: Path, disturb: list[Callable[[JobSet], None]]) -> None:
        super().__init__(daemon=True)
        self.here = here
        self.run_dir = folder / "claim"
        self.disturb = disturb
        self.agents: list[subprocess.Popen[bytes]] = []
        self.codes: list[list[int]] = []

    def run(self) -> None:
        wait_until(lambda: bool(self.here.cluster.names("jobsets")), "a JobSet")
        [name] = self.here.cluster.names("jobsets")
        spec = self.here.cluster.find("jobsets", name)["spec"]
        launched, failures = Run(self.here.store.root / name), 0
        while True:
            codes = self._attempt(launched, spec, len(self.codes))
            self.codes.append(codes)
            failures += any(code not in (0, 75) for code in codes)
            if not any(codes) or failures > spec["failurePolicy"]["maxRestarts"]:
                break
            for pod in self.here.cluster.names("pods"):
                self.here.cluster.finish("pods", pod)
            self.here.cluster.set_status("jobsets", name, restarts=len(self.codes))
        self.here.cluster.set_status("jobsets", name, conditions=[condition("Failed" if any(codes) else "Completed")])

    def _attempt(self, launched: Run, spec: Any, attempt: int) -> list[int]:
        [container] = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        port = free_port()
        pods = [self.here.pod(launched, node, attempt=attempt) for node in range(NODES)]
        self.agents, readers = [], []
        for node, pod in enumerate(pods):
            words = [self._here(word, launched, node, port) for word in container["command"]]
            environment = ranks_environment(**{each["name"]: each["value"] for each in container.get("env", [])})
            agent = subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
            self.agents.append(agent)
            readers.append(threading.Thread(target=self._copy, args=(agent, pod), daemon=True))
            readers[-1].start()
        if self.disturb:
            self.disturb.pop(0)(self)
        codes = [agent.wait(120 * PATIENCE) for agent in self.agents]
        for node, (pod, reader) in enumerate(zip(pods, readers, strict=True)):
            reader.join()
            ended = self.run_dir.parent / f"ended-{node}"
            self.here.end_pod(pod, codes[node], ended.read_text() if ended.exists() else "")
        return codes

    def _here(self, word: str, launched: Run, node: int, port: int) -> str:
        """Return a word of the command with cluster paths and addresses replaced by this machine's."""
        places = {
            "python": sys.executable,
            "/etc/partool/plan.json": str(launched.path / "plan.json"),
            f"/partool/runs/{launched.id}": str(self.run_dir),
            "$(JOB_COMPLETION_INDEX)": str(node),
            "/dev/termination-log": str(self.run_dir.parent / f"ended-{node}"),
        }
        return re.sub(r"^\S+:29500$", f"127.0.0.1:{port}", places.get(word, word))

    def _copy(self, agent: subprocess.Popen[bytes], pod: str) -> None:
        assert agent.stdout is not None
        with agent.stdout:
            for line in agent.stdout:
                self.here.cluster.write(pod, line.decode().rstrip("\n"))

    def wait_for_step(self, step: int) -> None:
        file = self.run_dir / "events" / "rank-0.jsonl"

        def reached() -> bool:
            assert all(agent.poll() is None for agent in self.agents), self.here.cluster.logs
            events = [json.loads(line) for line in file.read_text().splitlines()[-3:]] if file.exists() else []
            return any(event["kind"] == "step" and event["data"]["step"] >= step for event in events)

        wait_until(reached, f"step {step}", timeout_s=60)


def kill_a_rank(jobs: JobSet) -> None:
    jobs.wait_for_step(8)
    agents = {agent.pid for agent in jobs.agents}
    os.kill(next(pid for pid in processes_of(jobs.run_dir) if pid not in agents), signal.SIGKILL)


def evict_a_pod(jobs: JobSet) -> None:
    jobs.wait_for_step(18)
    jobs.agents[1].send_signal(signal.SIGTERM)


def test_over_a_killed_rank_and_an_evicted_pod_to_the_end(here: Case, tmp_path: Path) -> None:
    Path("plan.json").write_text(plan_of(tmp_path).to_json())
    jobs = JobSet(here, tmp_path, [kill_a_rank, evict_a_pod])
    jobs.start()
    try:
        result = invoke("launch", "plan.json", "--follow")
    finally:
        for agent in jobs.agents:
            agent.kill()
    jobs.join(30)
    assert result.exit_code == 0, f"{result.output}\n{jobs.codes}"
    assert [sorted(set(codes)) for codes in jobs.codes] == [[1], [75], [0]]
    assert sorted(losses(jobs.run_dir)) == list(range(1, STEPS + 1))
    [run] = here.store.runs()
    status = json.loads(invoke("status", run.id, "--output", "json").stdout)
    assert (status["state"], status["exit_code"], status["attempt"]) == ("done", 0, 3)
    written = [line for (_, _, _), log in here.cluster.logs.items() for _, line in log.lines]
    assert sorted(result.stdout.encode().splitlines()) == sorted(written)

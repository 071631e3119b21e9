"""An Indexed Job restarts its pods one by one; the agents turn this into a restart of the whole gang.

The agents are real, their ranks run the dummy job, and a small controller treats the processes as the Job controller
treats pods, following the rendered object.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from launch_helpers import HERE, make_plan, processes_of, ranks_environment, wait_until
from patience import PATIENCE
from ports import free_port

from partool.plan.run import read_status
from partool.render.job import Job
from partool.render.k8s import render

pytestmark = pytest.mark.timeout(150)
TIMING = {"beat_s": 0.1, "silent_s": 3.0, "notice_s": 1.0, "stranger_s": 10.0, "arrival_s": 60.0, "farewell_s": 3.0}
NODES = 2


class JobController:
    """Runs the pods of a Job with two indexes, each of which restarts on its own after ``delays_s[index]``."""

    def __init__(self, run_dir: Path, script: dict[str, str], restarts: int, delays_s: tuple[float, float]) -> None:
        run_dir.mkdir()
        plan = make_plan(NODES, target="k8s", image="partool:1", restarts=restarts, k8s={"kind": "job"})
        plan = plan.model_copy(update={"devices": plan.devices.model_copy(update={"nodes": NODES, "per_node": 1})})
        (run_dir / "plan.json").write_text(plan.to_json())
        (run_dir / "script.json").write_text(json.dumps(script))
        rendered = render(Job(plan, "dummy-12345678", PurePosixPath(run_dir)))
        self.spec: dict[str, Any] = list(yaml.safe_load_all(rendered.text))[-1]["spec"]
        self.run_dir = run_dir
        self.delays_s = delays_s
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: dict[int, list[int]] = {index: [] for index in range(NODES)}
        self.failures = dict.fromkeys(range(NODES), 0)
        self._port = free_port()

    def command(self, index: int) -> list[str]:
        """Return the container's command with its node placeholders replaced by this machine's values."""
        words = self.spec["template"]["spec"]["containers"][0]["command"]
        here = {
            "/etc/partool/plan.json": str(self.run_dir / "plan.json"),
            "/partool/runs/dummy-12345678": str(self.run_dir),
            "$(JOB_COMPLETION_INDEX)": str(index),
            "dummy-12345678-0.dummy-12345678:29500": f"127.0.0.1:{self._port}",
            "/dev/termination-log": str(self.run_dir / f"ended-{index}"),
        }
        assert words[:4] == ["python", "-P", "-m", "partool_runtime.agent"]
        assert here.keys() <= set(words)
        return [sys.executable, str(HERE / "dummy_agent.py"), *(here.get(word, word) for word in words[4:])]

    def start(self, index: int) -> None:
        """Start the pod of an index; first removes the file by which dummy ranks signal each other to stop."""
        (self.run_dir / "stopping").unlink(missing_ok=True)
        log = (self.run_dir / f"pod-{index}-{len(self.codes[index])}.log").open("wb")
        environment = ranks_environment(PARTOOL_TEST_TIMING=json.dumps(TIMING))
        command = self.command(index)
        with log:
            self.pods[index] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def action(self, code: int) -> str:
        """Return the pod failure policy's action for an exit code."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Count"

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Run the Job to its end; returns whether it succeeded."""
        due = dict.fromkeys(range(NODES), 0.0)
        done: set[int] = set()
        end = time.monotonic() + 100
        try:
            while len(done) < NODES:
                assert time.monotonic() < end, self.codes
                for index in sorted(due.keys() - done):
                    pod = self.pods.get(index)
                    if pod is None and time.monotonic() >= due[index]:
                        self.start(index)
                    if pod is None or pod.poll() is None:
                        continue
                    del self.pods[index]
                    self.codes[index].append(pod.returncode)
                    if pod.returncode == 0:
                        done.add(index)
                    elif self.action(pod.returncode) == "FailJob":
                        return False
                    elif self.action(pod.returncode) == "Count":
                        self.failures[index] += 1
                    failed = sum(count > self.spec["backoffLimitPerIndex"] for count in self.failures.values())
                    if failed > self.spec["maxFailedIndexes"]:
                        return False
                    due[index] = time.monotonic() + self.delays_s[index]
                meanwhile()
                time.sleep(0.02)
            return True
        finally:
            self._stop()

    def _stop(self) -> None:
        for pod in self.pods.values():
            pod.terminate()
        for index, pod in self.pods.items():
            self.codes[index].append(pod.wait(60 * PATIENCE))


@pytest.mark.parametrize(
    "delays_s",
    [
        pytest.param((0.0, 3.0), id="node 1 is late", marks=pytest.mark.long),
        pytest.param((3.0, 0.0), id="node 0 is late", marks=pytest.mark.long),
    ],
)
def test_a_failure_and_a_preemption_restart_all_pods(tmp_path: Path, delays_s: tuple[float, float]) -> None:
    """Rank 1 fails in the first attempt, the pod of node 1 is evicted in the second, the third runs to the end.

    The pods come back at different times, so that a new agent may find an old one, or none, for a while.
    """
    script = {"0@1": "follow", "1@1": "raise", "0@2": "follow", "1@2": "follow"}
    controller = JobController(tmp_path / "run", script, restarts=1, delays_s=delays_s)
    evicted: list[int] = []

    def evict() -> None:
        both_began = all((controller.run_dir / f"start-{rank}-2.json").exists() for rank in (0, 1))
        if not evicted and both_began and 1 in controller.pods:
            time.sleep(0.3)
            controller.pods[1].send_signal(signal.SIGTERM)
            evicted.append(1)

    assert controller.run(evict), controller.codes
    assert controller.codes == {0: [1, 75, 0], 1: [1, 75, 0]}
    assert controller.failures == {0: 1, 1: 1}
    for rank in (0, 1):
        starts = [
            json.loads((controller.run_dir / f"start-{rank}-{attempt}.json").read_text()) for attempt in (1, 2, 3)
        ]
        assert all(start["resume"] for start in starts)
        assert (controller.run_dir / f"checkpoint-{rank}").exists()
    status = read_status(controller.run_dir)
    assert (status.state, status.attempt) == ("done", 3)
    wait_until(lambda: processes_of(controller.run_dir) == [], "the end of all processes")


@pytest.mark.long
def test_restarts_are_used_up_by_failures_of_the_run_and_not_of_its_pods(tmp_path: Path) -> None:
    controller = JobController(tmp_path / "run", {"0": "follow", "1": "exit:3"}, restarts=1, delays_s=(0.5, 0.0))
    assert not controller.run()
    assert [codes[:2] for codes in controller.codes.values()] == [[1, 1], [1, 1]]
    assert read_status(controller.run_dir).attempt == 2
    assert {file.name for file in (controller.run_dir / "logs").glob("attempt-*")} == {"attempt-1", "attempt-2"}


@pytest.mark.long
def test_a_configuration_error_is_not_tried_again(tmp_path: Path) -> None:
    controller = JobController(tmp_path / "run", {"0": "follow", "1": "configuration"}, restarts=5, delays_s=(0.0, 0.0))
    assert not controller.run()
    codes = [code for each in controller.codes.values() for code in each]
    assert 78 in codes
    assert set(codes) <= {78, -signal.SIGTERM}  # the other pod is stopped if it has not ended yet
    assert read_status(controller.run_dir).attempt == 1

"""The real trainer under the real agent, through every way of stopping and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import processes_of, trainable_plan, wait_until

from partool.plan.run import agent_command, read_status
from partool.plan.types import Plan

STEPS = 80


@pytest.mark.timeout(170)
def test_killed_restarted_stopped_and_resumed_gives_the_weights_of_an_unbroken_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    plan = trainable_plan(text, STEPS, restarts=1)
    unbroken = _start(tmp_path / "unbroken", plan)
    assert _end(unbroken) == 0

    folder = tmp_path / "broken"
    agent = _start(folder, plan)
    wait_until(lambda: _step(folder) >= 13, "step 13")
    os.kill(_rank_pid(folder, 1), signal.SIGKILL)
    wait_until(lambda: _step(folder, attempt=2) >= 33, "step 33 of the second attempt")
    assert _start_event(folder, 2)["resumed_from"] >= 10
    agent.send_signal(signal.SIGUSR2)
    assert _end(agent) == 75
    stopped_at = _step(folder, attempt=2)
    assert (folder / f"checkpoints/step-{stopped_at:08}").is_dir()
    assert read_status(folder).state == "preempted"

    assert _end(_start(folder, plan, resume=True)) == 0
    assert _start_event(folder, 3)["resumed_from"] == stopped_at
    assert read_status(folder).attempt == 3
    assert processes_of(tmp_path) == []
    last = f"checkpoints/step-{STEPS:08}"
    states = sorted(file.name for file in (folder / last).glob("*.distcp"))
    assert len(states) == 2
    for name in states:
        assert (folder / last / name).read_bytes() == (tmp_path / "unbroken" / last / name).read_bytes()


def _start(folder: Path, plan: Plan, *, resume: bool = False) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(plan.to_json())
    with (folder / f"agent{'-again' * resume}.txt").open("wb") as output:
        command = agent_command(sys.executable, folder / "plan.json", folder, resume=resume)
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def _end(agent: subprocess.Popen[bytes]) -> int:
    try:
        return agent.wait(60)
    finally:
        agent.kill()


def _events(folder: Path, attempt: int) -> list[dict[str, object]]:
    """Return rank 0's events of an attempt."""
    try:
        lines = (folder / "events" / "rank-0.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    found: dict[int, list[dict[str, object]]] = {}
    current = 0
    for event in map(json.loads, lines):
        if event["kind"] == "start":
            current = event["data"]["attempt"]
        found.setdefault(current, []).append(event)
    return found.get(attempt, [])


def _step(folder: Path, attempt: int = 1) -> int:
    steps = [event["data"]["step"] for event in _events(folder, attempt) if event["kind"] == "step"]  # type: ignore[index]
    return int(steps[-1]) if steps else 0


def _start_event(folder: Path, attempt: int) -> dict[str, int]:
    return _events(folder, attempt)[0]["data"]  # type: ignore[return-value]


def _rank_pid(folder: Path, rank: int) -> int:
    """Return the process of a rank: the one whose log it is."""
    for pid in processes_of(folder):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"no process of rank {rank}")

"""The real trainer under the real agent, through every way of stopping and resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_helpers import processes_of, rank_pid, trainable_plan, wait_until
from patience import PATIENCE
from torch.distributed.checkpoint import FileSystemReader

from partool.layout.checkpoint import checkpoint_bytes
from partool.plan.profiling import traces
from partool.plan.progress import read_progress
from partool.plan.run import agent_command, read_status
from partool.report.step_profile import read_profile
from partool.spec.telemetry import ProfileSpec, TelemetrySpec
from partool.spec.training import CheckpointSpec

STEPS, EVERY = 80, 30


@pytest.mark.timeout(170)
def test_every_way_of_stopping_and_going_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    shared = tmp_path / "shared"
    foreign = shared / "other" / "step-00000500"
    foreign.mkdir(parents=True)  # belongs to another run: must be neither resumed from nor changed
    checkpoint = CheckpointSpec(every=EVERY, keep=3, dir=str(shared))
    telemetry = TelemetrySpec(profile=ProfileSpec(steps=[4, 5], ranks=[1]))
    plan = trainable_plan(text, STEPS, restarts=2).model_copy(update={"checkpoint": checkpoint, "telemetry": telemetry})
    folder = tmp_path / "broken"
    own = shared / "broken"
    folder.mkdir()
    (folder / "plan.json").write_text(plan.to_json())

    agent = _start(folder, *agent_command(sys.executable, folder / "plan.json", folder, resume=False))
    wait_until(lambda: _step(folder, attempt=1) >= 33, "step 33 of the first attempt")
    agent.send_signal(signal.SIGUSR2)
    assert _end(agent) == 75
    stopped_at = _step(folder, attempt=1)
    assert _names(own) == ["step-00000030", f"step-{stopped_at:08}"]
    assert read_status(folder).state == "preempted"

    launch = [sys.executable, "-m", "partool", "launch", "--resume", str(folder), "--step", str(EVERY)]
    launcher = _start(folder, *launch)
    _kill_when(folder, 2, lambda: _step(folder, attempt=2) > EVERY)
    _kill_when(folder, 3, (own / "step-00000060").is_dir, lambda: _damage(own / "step-00000060"))
    assert _end(launcher) == 0
    assert [_start_event(folder, attempt)["resumed_from"] for attempt in range(1, 5)] == [0, 30, 30, 30]
    said = (folder / "agent.txt").read_text()
    assert "PT659: the checkpoint of step 60 is skipped and kept as step-00000060.aside" in said
    progress = read_progress(folder)
    assert progress is not None
    assert progress.attempt == 4
    assert progress.step > EVERY
    assert read_status(folder).attempt == 4
    assert processes_of(tmp_path) == []
    complete = [f"step-{step:08}" for step in (30, 60, 80)]
    assert _names(own) == sorted([*complete, "step-00000060.aside", f"step-{stopped_at:08}.aside"])
    assert _names(shared) == ["broken", "other"]
    assert list(foreign.iterdir()) == []
    tensors = FileSystemReader(own / "step-00000080").read_metadata().state_dict_metadata.values()
    written = sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)  # type: ignore[union-attr]
    assert checkpoint_bytes(plan.model, plan.optimizer.name, weight_bytes=4, moment_bytes=4, frozen_bytes=4) == written
    losses: dict[object, object] = {}
    for attempt in range(1, 5):
        for step in (event["data"] for event in _events(folder, attempt) if event["kind"] == "step"):
            assert losses.setdefault(step["step"], step["loss"]) == step["loss"]  # type: ignore[index]
    assert len(losses) == STEPS
    ((steps, rank, trace),) = traces(folder)
    assert (steps, rank, read_profile(trace).steps) == ((4, 5), 1, (4, 5))
    assert sum(event["kind"] == "profile" for attempt in range(1, 5) for event in _events(folder, attempt)) == 1


def _start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    with (folder / "agent.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def _kill_when(
    folder: Path, attempt: int, condition: Callable[[], bool], first: Callable[[], None] = lambda: None
) -> None:
    """Call ``first`` and kill rank 1 of an attempt, once the condition holds and the attempt has done a step."""
    wait_until(lambda: condition() and _step(folder, attempt) > 0, f"the moment to kill attempt {attempt}")
    first()
    os.kill(rank_pid(folder, 1), signal.SIGKILL)


def _damage(checkpoint: Path) -> None:
    file = checkpoint / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".")


def _end(agent: subprocess.Popen[bytes]) -> int:
    try:
        return agent.wait(60 * PATIENCE)
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

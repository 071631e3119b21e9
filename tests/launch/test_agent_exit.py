"""Ends of the agent: exit codes, restarts, messages, status and logs. The agents of a test run concurrently."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_helpers import AgentRun, make_plan

from partool.launch.describe import errors_as_text
from partool.launch.local.target import LocalTarget
from partool.launch.store import Run
from partool.launch.target import LogQuery

pytestmark = pytest.mark.timeout(120)


def test_done_and_failed(tmp_path: Path) -> None:
    """Exit codes, messages and status of runs that end without a signal."""
    done = AgentRun(tmp_path / "done", {}, make_plan(env={"OMP_NUM_THREADS": "3", "COLOUR": "green"})).start()
    failed = AgentRun(tmp_path / "failed", {"0": "follow", "1": "raise"}).start()
    silent = AgentRun(tmp_path / "silent", {"1": "exit:3"}).start()
    refused = AgentRun(tmp_path / "refused", {}, make_plan().model_copy(update={"runnable": False})).start()
    unwritable = AgentRun(tmp_path / "unwritable", {}, make_plan(restarts=2))
    (unwritable.run_dir / "logs").touch()  # a file where a folder is needed: not even root can write below it
    unwritable.start()

    assert done.finish() == 0
    assert (done.status.state, done.status.exit_code, done.status.attempt, done.status.reason) == ("done", 0, 1, "")
    assert done.output == "rank 0 attempt 1 begins\nrank 0 attempt 1 done\n"
    assert done.errors == ""
    assert (done.run_dir / "logs/attempt-1/rank-1.stdout.log").read_text().endswith("rank 1 attempt 1 done\n")
    environment = done.rank_start(1)["env"]
    wanted = {"OMP_NUM_THREADS": "3", "COLOUR": "green", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert {name: environment[name] for name in wanted} == wanted
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert not done.rank_start(0)["resume"]

    assert failed.finish() == 1
    assert failed.status.reason == "rank 1: ValueError: broken on purpose by rank 1"
    message = failed.errors.splitlines()
    assert message[0] == "partool: rank 1 failed (attempt 1): ValueError: broken on purpose by rank 1"
    assert message[1] == "  Traceback (most recent call last):"
    assert message[-4].strip() == "ValueError: broken on purpose by rank 1"
    assert message[-3:] == [
        "rank 0 ended after it",
        f"logs: {failed.run_dir}/logs/attempt-1",
        "  help: with launch: {restarts: 1} the agent starts the ranks again by itself",
    ]
    assert "torch" not in failed.errors

    assert silent.finish() == 1
    assert "rank 1 failed (attempt 1): ended with exit code 3 and no error record\n  last words\n" in silent.errors

    assert refused.finish() == 78
    assert "PT505" in refused.errors
    assert (refused.status.state, refused.status.attempt) == ("failed", 0)
    assert unwritable.finish() == 78
    assert "Traceback" not in unwritable.errors
    where = f"{unwritable.run_dir}/logs"
    assert unwritable.errors.startswith(f"partool: PT512: {where} cannot be written: File exists\n  help: let the user")
    assert (unwritable.status.state, unwritable.status.exit_code) == ("failed", 78)
    assert all(run.survivors() == [] for run in (done, failed, silent, refused, unwritable))


def test_restarts(tmp_path: Path) -> None:
    """A failed rank is restarted with --resume, a limited number of times, and not after exit code 78."""
    (tmp_path / "mended" / "checkpoints" / "step-00000010").mkdir(parents=True)
    mended = AgentRun(tmp_path / "mended", {"0@1": "kill"}, make_plan(restarts=2)).start(fresh=True)
    (tmp_path / "given-up" / "checkpoints" / "step-00000007").mkdir(parents=True)
    given_up = AgentRun(tmp_path / "given-up", {"1": "raise"}).start()
    hopeless = AgentRun(tmp_path / "hopeless", {"0": "raise"}, make_plan(1, restarts=1)).start()
    wrong = AgentRun(tmp_path / "wrong", {"0": "configuration"}, make_plan(1, restarts=2)).start()

    assert wrong.finish() == 78
    assert wrong.status.attempt == 1
    assert "rank 0 failed (attempt 1): PT699: the file is not there\n  help: write it\n" in wrong.errors
    assert "Traceback" not in wrong.errors

    assert hopeless.finish() == 1
    assert hopeless.status.attempt == 2
    assert hopeless.errors.count("Traceback") == 1
    assert "rank 0 failed (attempt 2): ValueError" in hopeless.errors
    why = "rank 0 failed (ValueError: broken on purpose by rank 0)"
    assert hopeless.errors.startswith(f"partool: {why}; attempt 2 of 2 begins anew\n")
    assert "help:" not in hopeless.errors

    assert given_up.finish() == 1
    assert "  help: partool launch --resume given-up goes on from step 7; with launch: {restarts: 1}" in given_up.errors

    assert mended.finish() == 0, mended.errors
    assert (mended.status.state, mended.status.attempt) == ("done", 2)
    killed = "killed by SIGKILL (often the kernel's out-of-memory killer)"
    said = f"partool: rank 0 failed ({killed}); attempt 2 of 3 goes on from step 10\n"
    assert mended.errors == said
    lines = LocalTarget().logs(Run(mended.run_dir), LogQuery())
    assert [line.text.decode() for line in lines if line.rank is None] == [said]
    assert errors_as_text(mended.run_dir).splitlines()[0].startswith("rank 0, attempt 1, ")  # though it left no record
    assert errors_as_text(mended.run_dir).splitlines()[1] == killed
    assert [mended.rank_start(rank, attempt)["resume"] for rank, attempt in ((1, 1), (0, 2), (1, 2))] == [
        False,
        True,
        True,
    ]
    assert mended.output.endswith("rank 0 attempt 2 done\n")
    assert (mended.run_dir / "logs/attempt-1/rank-0.stdout.log").exists()


def test_folder_is_locked(tmp_path: Path) -> None:
    """A second agent in the same folder is refused and changes nothing; other processes cannot take the ranks' port."""
    first = AgentRun(tmp_path, {"0": "follow", "1": "follow"}).start()
    first.wait_for("steps-0", "steps-1")
    port = int(first.rank_start(0)["env"]["MASTER_PORT"])
    with (
        socket.socket() as stranger,
        pytest.raises(OSError, match="in use"),
    ):  # although no rank has opened the port yet
        stranger.bind(("127.0.0.1", port))
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    second = AgentRun(tmp_path, first.script).start()
    assert second.finish() == 78
    assert "PT504" in second.errors
    assert first.status.state == "running"
    assert first.process is not None
    first.process.terminate()
    assert first.finish() == 75


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(1000):
            file.write(b"x" * 4096)


def test_a_full_disk(small_disk: Path) -> None:
    """The status says how the run ended although no new file can be created, and there is exactly one error message."""
    run = AgentRun(small_disk / "run", {"0": "follow", "1": "follow"}).start()
    run.wait_for("steps-0", "steps-1")
    pid = run.rank_start(1)["pid"]
    with pytest.raises(OSError, match="No space"):
        fill(small_disk / "filling")
    os.kill(pid, signal.SIGABRT)
    assert run.finish() == 1
    assert run.status.state == "failed"
    assert "; the file system of " in run.errors
    assert run.errors.count("Traceback") == 0
    assert run.errors.startswith("partool: rank ")
